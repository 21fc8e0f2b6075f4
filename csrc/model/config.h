// The shape of a decoder: pyserve/models/config.py, field by field.
#pragma once

#include <vector>

namespace pyserve {

enum class Norm { rms, layer };
enum class Activation { silu, gelu_tanh };

struct RopeConfig {
  std::vector<float> inv_freq;  // head_dim / 2, radians per position
  float attention_factor = 1.0f;
};

struct DecoderConfig {
  int vocab_size;
  int hidden_size;
  int num_layers;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int intermediate_size;
  int context_length;
  Norm norm;
  float norm_eps;
  Activation activation;
  bool gated_mlp;
  bool qk_norm;
  bool post_norms;
  float attention_scale;
  float embedding_scale;
  std::vector<int> layer_window;  // 0: full
  std::vector<int> layer_rope;    // -1: none
  std::vector<RopeConfig> ropes;
  bool learned_positions;
  bool tie_embeddings;

  int q_size() const { return num_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
};

}  // namespace pyserve
