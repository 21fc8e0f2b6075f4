// The forward pass of a decoder-only transformer over one packed step.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/kv_cache.h"
#include "model/paged_attention.h"
#include "model/prefault.h"
#include "model/step_input.h"
#include "model/wanted_tokens.h"
#include "model/weights.h"
#include "profile/range.h"

namespace pyserve {

// Owns weights, KV storage and work space. Not for two threads at once.
class Decoder {
 public:
  Decoder(DecoderConfig config, DType dtype, const Kernels& kernels);

  void load(const std::string& name, std::span<const std::int64_t> shape, const float* data);
  // A matrix in a format's blocks, quantised then; shape in elements.
  void load(const std::string& name, std::span<const std::int64_t> shape,
            const StoredFormat& format, const std::uint8_t* blocks);
  // All weights are in; throws std::invalid_argument where they do not fit.
  void seal();
  // With prefault, memory for all of it is taken in idle time from now on; else when first written.
  void allocate_kv(int num_blocks, int block_size, KvType type, bool prefault);
  // Until prefaulting is through.
  void await_kv();
  // Writes the KV of all T tokens, logits [R, vocab_size] and final hidden states [E, hidden_size].
  // Throws std::invalid_argument, with nothing written, where an index is out of range.
  void forward(const StepInput& step, float* logits, float* hidden);

  // Room for the logits of so many rows, contents unspecified: the same memory as last time if
  // nobody else holds it any more.
  std::shared_ptr<Buffer> logits_room(int rows);

  const DecoderConfig& config() const { return config_; }
  std::string_view isa() const { return kernels_.name; }
  std::size_t weight_bytes() const { return weights_.bytes(); }
  std::size_t kv_bytes() const { return cache_.bytes(); }

 private:
  struct Matrix {
    Buffer data;
    std::ptrdiff_t stride = 0;
    float* row(std::ptrdiff_t i) const { return data.as<float>() + i * stride; }
    float* begin() const { return data.as<float>(); }
  };

  // How a sublayer begins: the norm, and the projection that its result goes through.
  struct Entry {
    const NormWeight& norm;
    const Projection& projection;
  };

  void validate(const StepInput& step) const;
  void validate_sequences(const StepInput& step) const;
  void reserve(int tokens);
  void plan_attention(const StepInput& step);
  void compute_angles(const StepInput& step);
  void embed(const StepInput& step);
  void run_layer(const StepInput& step, int layer);
  void run_last_layer(const StepInput& step);
  void finish_layer(int layer, int rows);
  void position_keys(const StepInput& step, int layer, int token);
  void position_queries(int layer, int row, const float* angles);
  void position_head(float* head, const std::vector<float>& norm, const float* angles,
                     float scale) const;
  const float* angles_of(int layer, int token, int tokens) const;
  void attend(const StepInput& step, int layer);
  void activate(float* row) const;
  void add_residual(const NormWeight& post_norm, int rows, const std::optional<Entry>& next);
  void enter_row(const Entry& entry, int from, int to, int thread);
  void normalize_row(const NormWeight& norm, const float* from, float* to) const;
  void head(float* logits, float* hidden);
  void project(profile::Op op, const Projection& weight, const Matrix& from, int rows, float* to,
               std::ptrdiff_t ldt, int begin = 0, int end = INT_MAX);
  profile::Cost attention_cost(const StepInput& step, int layer) const;
  // Of an op that passes over the rows of activations once.
  static profile::Cost row_cost(double floats, double operations_each);
  template <typename Body>
  void for_rows(int rows, int row_floats, const Body& body);

  DecoderConfig config_;
  const Kernels& kernels_;
  Weights weights_;
  bool sealed_ = false;
  KvCache cache_;
  Prefault prefault_;  // of cache_

  // Work space for capacity_ tokens; grown when a larger step comes.
  int capacity_ = 0;
  Matrix residual_;  // [T, hidden]
  Matrix normed_;    // [T, hidden]: input of a sublayer
  Matrix qkv_;       // [T, q + 2 kv]
  Matrix attended_;  // [T, q]
  Matrix inner_;     // [T, gate + up]
  Matrix sublayer_;  // [T, hidden]: output of a sublayer
  Matrix angles_;    // [ropes * T, 2 * head_dim / 2]: cosines, then sines
  int row_work_threads_ = 0;
  Matrix row_work_;  // [threads, hidden]
  PagedAttention attention_;
  NarrowRows narrow_;  // input of a projection that takes fewer bits
  WantedTokens wanted_;
  std::shared_ptr<Buffer> logits_;
};

}  // namespace pyserve
