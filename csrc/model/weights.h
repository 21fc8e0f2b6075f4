// A decoder's weights, by canonical name (pyserve/models/config.py lists them) and in packed form.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kernels/projection.h"
#include "model/config.h"

namespace pyserve {

struct NormWeight {
  std::vector<float> weight;
  std::vector<float> bias;  // LayerNorm only
};

struct LayerWeights {
  NormWeight attn_norm;
  Projection qkv;  // query, key and value rows, in this order
  std::vector<float> q_norm;
  std::vector<float> k_norm;
  Projection o;
  NormWeight attn_post_norm;
  NormWeight mlp_norm;
  Projection gate_up;  // gate rows, then up rows; without a gate, up rows only
  Projection down;

  std::array<Projection*, 4> projections() { return {&qkv, &o, &gate_up, &down}; }
  NormWeight mlp_post_norm;
};

class Weights {
 public:
  Weights(const DecoderConfig& config, DType dtype, const Kernels& kernels);
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // Copies one tensor in. An unknown name is remembered for check(); a wrong shape throws
  // std::invalid_argument.
  void load(const std::string& name, std::span<const std::int64_t> shape, const float* data);
  // The same for a matrix, shape [rows, columns] in elements, in a format's blocks: quantised
  // then. A weight that is not a linear layer's throws std::invalid_argument.
  void load(const std::string& name, std::span<const std::int64_t> shape,
            const StoredFormat& format, const std::uint8_t* blocks);
  // Throws std::invalid_argument that lists what is missing and what was not expected.
  void check() const;
  // Once all are there: lays the layers' matrices one behind the other as they are read, on huge
  // pages, for most of them are too small to get any.
  void gather();
  std::size_t bytes() const;

  const Projection& head() const { return tied_ ? embed : lm_head; }

  Projection embed;
  std::vector<float> positions;  // [context_length, hidden], or empty
  std::vector<LayerWeights> layers;
  NormWeight final_norm;

 private:
  Buffer gathered_;

  struct Slot {
    std::vector<std::int64_t> shape;
    bool required;
    bool loaded = false;
    std::function<void(const float*)> copy;
    std::function<void(const StoredFormat&, const std::uint8_t*)> copy_blocks =
        nullptr;  // linear layers only
  };

  // Null, and remembered, where the name is unknown.
  Slot* slot_for(const std::string& name, std::span<const std::int64_t> shape);
  void add_vector(const std::string& name, std::vector<float>& to, std::vector<std::int64_t> shape);
  void add_norm(const std::string& name, NormWeight& norm, int size, bool bias);
  void add_linear(const std::string& name, Projection& linear, int rows, int at);
  void add_layer(int index, const DecoderConfig& config, DType dtype, const Kernels& kernels);

  bool tied_;
  Projection lm_head;
  std::map<std::string, Slot> slots_;
  std::vector<std::string> unexpected_;
};

}  // namespace pyserve
