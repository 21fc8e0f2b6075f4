#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace pyserve {

using profile::Op;
using profile::Range;

namespace {

// Work below this is not worth waking another thread for.
constexpr int kFloatsPerItem = 16384;

}  // namespace

Decoder::Decoder(DecoderConfig config, DType dtype, const Kernels& kernels)
    : config_(std::move(config)),
      kernels_(kernels),
      weights_(config_, dtype, kernels),
      attention_(kernels, config_.num_heads, config_.num_kv_heads) {}

void Decoder::load(const std::string& name, std::span<const std::int64_t> shape,
                   const float* data) {
  if (sealed_) throw std::logic_error("the weights are sealed: " + name + " comes too late");
  weights_.load(name, shape, data);
}

void Decoder::load(const std::string& name, std::span<const std::int64_t> shape,
                   const StoredFormat& format, const std::uint8_t* blocks) {
  if (sealed_) throw std::logic_error("the weights are sealed: " + name + " comes too late");
  weights_.load(name, shape, format, blocks);
}

void Decoder::seal() {
  weights_.check();
  sealed_ = true;
}

void Decoder::allocate_kv(int num_blocks, int block_size, KvType type) {
  if (num_blocks <= 0 || block_size <= 0)
    throw std::invalid_argument("num_blocks and block_size must be positive");
  if (std::int64_t{num_blocks} * block_size > INT32_MAX)
    throw std::invalid_argument("num_blocks * block_size must fit 32 bits: slots are int32");
  cache_ = KvCache();
  cache_ = KvCache(kernels_, type, config_.num_layers, config_.num_kv_heads, config_.head_dim,
                   num_blocks, block_size);
}

template <typename Body>
void Decoder::for_rows(int rows, int row_floats, const Body& body) {
  const int per_item = std::max(1, kFloatsPerItem / row_floats);
  shared_pool().run((rows + per_item - 1) / per_item, [&](int item, int) {
    const int end = std::min(rows, (item + 1) * per_item);
    for (int row = item * per_item; row < end; ++row) body(row);
  });
}

void Decoder::reserve(int tokens) {
  if (tokens <= capacity_) return;
  capacity_ = tokens;
  const auto matrix = [](std::ptrdiff_t rows, std::ptrdiff_t columns) {
    // An odd number of cache lines a row: rows of a tile do not fall into one cache set.
    const std::ptrdiff_t stride = (round_up(columns, 16) / 16 | 1) * 16;
    return Matrix{Buffer(rows * stride * sizeof(float)), stride};
  };
  const int inner = config_.intermediate_size * (config_.gated_mlp ? 2 : 1);
  residual_ = matrix(tokens, config_.hidden_size);
  normed_ = matrix(tokens, config_.hidden_size);
  qkv_ = matrix(tokens, config_.q_size() + 2 * config_.kv_size());
  attended_ = matrix(tokens, config_.q_size());
  inner_ = matrix(tokens, inner);
  sublayer_ = matrix(tokens, config_.hidden_size);
  angles_ = matrix(std::ptrdiff_t(config_.ropes.size()) * tokens, config_.head_dim);
}

void Decoder::compute_angles(const StepInput& step) {
  const int tokens = static_cast<int>(step.input_ids.size()), half = config_.head_dim / 2;
  const Range range(Op::angles);
  for (std::size_t r = 0; r < config_.ropes.size(); ++r) {
    const RopeConfig& rope = config_.ropes[r];
    for_rows(tokens, 64 * half, [&](int token) {
      float* cosine = angles_.row(std::ptrdiff_t(r) * tokens + token);
      const auto position = static_cast<float>(step.positions[token]);
      for (int i = 0; i < half; ++i) {
        const double angle = position * rope.inv_freq[i];
        cosine[i] = static_cast<float>(std::cos(angle)) * rope.attention_factor;
        cosine[half + i] = static_cast<float>(std::sin(angle)) * rope.attention_factor;
      }
    });
  }
}

void Decoder::embed(const StepInput& step) {
  const int hidden = config_.hidden_size;
  const Range range(Op::embed, [&] { return row_cost(2.0 * step.input_ids.size() * hidden, 0); });
  for_rows(static_cast<int>(step.input_ids.size()), 8 * hidden, [&](int token) {
    float* row = residual_.row(token);
    weights_.embed.read_row(step.input_ids[token], row);
    if (config_.embedding_scale != 1.0f)
      for (int i = 0; i < hidden; ++i) row[i] *= config_.embedding_scale;
    if (config_.learned_positions)
      kernels_.add(row, weights_.positions.data() + std::ptrdiff_t{step.positions[token]} * hidden,
                   hidden);
  });
}

void Decoder::normalize_row(const NormWeight& norm, const float* from, float* to) const {
  if (config_.norm == Norm::rms)
    kernels_.rms_norm(from, norm.weight.data(), config_.norm_eps, config_.hidden_size, to);
  else
    kernels_.layer_norm(from, norm.weight.data(), norm.bias.data(), config_.norm_eps,
                        config_.hidden_size, to);
}

void Decoder::normalize(const NormWeight& norm, int tokens, const Matrix& to) {
  const Range range(Op::norm, [&] { return row_cost(2.0 * tokens * config_.hidden_size, 2); });
  for_rows(tokens, 2 * config_.hidden_size,
           [&](int token) { normalize_row(norm, residual_.row(token), to.row(token)); });
}

// residual += sublayer, normalized first where the model has post norms.
void Decoder::add_residual(const NormWeight& post_norm, int tokens) {
  const Range range(Op::residual,
                    [&] { return row_cost(3.0 * tokens * config_.hidden_size, 0.4); });
  for_rows(tokens, 2 * config_.hidden_size, [&](int token) {
    float* from = sublayer_.row(token);
    if (config_.post_norms) normalize_row(post_norm, from, from);
    kernels_.add(residual_.row(token), from, config_.hidden_size);
  });
}

// Norms, rotates and scales one token's query and key heads in place, and writes its KV.
void Decoder::position_heads(const StepInput& step, int layer, int token) {
  const LayerWeights& w = weights_.layers[layer];
  const int dim = config_.head_dim, half = dim / 2, rope = config_.layer_rope[layer];
  const std::ptrdiff_t tokens = step.input_ids.size();
  const float* cosine = rope < 0 ? nullptr : angles_.row(rope * tokens + token);
  float* row = qkv_.row(token);
  const auto position = [&](float* head, const std::vector<float>& norm, float scale) {
    if (config_.qk_norm) kernels_.rms_norm(head, norm.data(), config_.norm_eps, dim, head);
    if (cosine != nullptr)
      kernels_.rotate(head, cosine, cosine + half, half, scale);
    else
      for (int i = 0; i < dim; ++i) head[i] *= scale;
  };
  for (int h = 0; h < config_.num_heads; ++h)
    position(row + h * dim, w.q_norm, config_.attention_scale);
  float* keys = row + config_.q_size();
  for (int h = 0; h < config_.num_kv_heads; ++h) position(keys + h * dim, w.k_norm, 1.0f);
  cache_.write(layer, step.slots[token], keys, keys + config_.kv_size());
}

void Decoder::attend(const StepInput& step, int layer) {
  const Range range(Op::attention, [&] { return attention_cost(step, layer); });
  attention_.run(shared_pool(), cache_, layer, config_.layer_window[layer], qkv_.begin(),
                 qkv_.stride, attended_.begin(), attended_.stride);
}

void Decoder::attention_layer(const StepInput& step, int layer) {
  const LayerWeights& w = weights_.layers[layer];
  const int tokens = static_cast<int>(step.input_ids.size());
  normalize(w.attn_norm, tokens, normed_);
  project(Op::qkv, w.qkv, normed_, tokens, qkv_.begin(), qkv_.stride);
  {
    const Range range(Op::rotary, [&] { return row_cost(2.0 * tokens * w.qkv.out(), 1.5); });
    for_rows(tokens, 4 * w.qkv.out(), [&](int token) { position_heads(step, layer, token); });
  }
  attend(step, layer);
  project(Op::o, w.o, attended_, tokens, sublayer_.begin(), sublayer_.stride);
  add_residual(w.attn_post_norm, tokens);
}

void Decoder::activate(float* row) const {
  const int n = config_.intermediate_size;
  const bool silu = config_.activation == Activation::silu;
  if (config_.gated_mlp)
    (silu ? kernels_.silu_mul : kernels_.gelu_mul)(row, row + n, n);
  else
    (silu ? kernels_.silu : kernels_.gelu)(row, n);
}

void Decoder::mlp_layer(int layer, int tokens) {
  const LayerWeights& w = weights_.layers[layer];
  normalize(w.mlp_norm, tokens, normed_);
  project(Op::gate_up, w.gate_up, normed_, tokens, inner_.begin(), inner_.stride);
  {
    const double floats = double(tokens) * (w.gate_up.out() + config_.intermediate_size);
    const Range range(Op::activation, [&] { return row_cost(floats, 6); });
    for_rows(tokens, 4 * config_.intermediate_size,
             [&](int token) { activate(inner_.row(token)); });
  }
  project(Op::down, w.down, inner_, tokens, sublayer_.begin(), sublayer_.stride);
  add_residual(w.mlp_post_norm, tokens);
}

void Decoder::head(const StepInput& step, float* logits, float* hidden) {
  const int size = config_.hidden_size, rows = static_cast<int>(step.logit_rows.size());
  {
    const Range range(Op::norm, [&] {
      return row_cost(2.0 * (rows + double(step.hidden_rows.size())) * size, 2);
    });
    for_rows(static_cast<int>(step.hidden_rows.size()), 2 * size, [&](int i) {
      normalize_row(weights_.final_norm, residual_.row(step.hidden_rows[i]),
                    hidden + std::ptrdiff_t{i} * size);
    });
    for_rows(rows, 2 * size, [&](int i) {
      normalize_row(weights_.final_norm, residual_.row(step.logit_rows[i]), normed_.row(i));
    });
  }
  project(Op::lm_head, weights_.head(), normed_, rows, logits, config_.vocab_size);
}

void Decoder::project(Op op, const Projection& weight, const Matrix& from, int rows, float* to,
                      std::ptrdiff_t ldt) {
  const Range range(op, [&] { return weight.cost(rows); });
  weight.apply(shared_pool(), from.begin(), from.stride, rows, to, ldt, quantized_);
}

profile::Cost Decoder::row_cost(double floats, double operations_each) {
  return {.cached_bytes = floats * sizeof(float), .float_operations = floats * operations_each};
}

// Each sequence's keys and values come from memory once, whatever the tiles are.
profile::Cost Decoder::attention_cost(const StepInput& step, int layer) const {
  const int window = config_.layer_window[layer];
  double keys = 0, pairs = 0;
  for (std::size_t s = 0; s + 1 < step.cu_seqlens.size(); ++s) {
    const int context = step.context_lens[s];
    const int first = context - (step.cu_seqlens[s + 1] - step.cu_seqlens[s]);
    const auto seen = [&](int length) { return window > 0 ? std::min(length, window) : length; };
    if (first < context) keys += context - (first + 1 - seen(first + 1));
    for (int length = first + 1; length <= context; ++length) pairs += seen(length);
  }
  const double width = double(config_.num_heads) * config_.head_dim;
  return {.memory_bytes = keys * cache_.layout().layer_bytes / cache_.block_size(),
          .cached_bytes = 2 * step.input_ids.size() * width * sizeof(float),
          .float_operations = 4 * pairs * width};
}

void Decoder::forward(const StepInput& step, float* logits, float* hidden) {
  const Range range(Op::forward);
  validate(step);
  const int tokens = static_cast<int>(step.input_ids.size());
  reserve(tokens);
  attention_.plan(cache_.layout(), shared_pool().size(), step.cu_seqlens, step.context_lens,
                  step.block_table.data(), step.table_width);
  compute_angles(step);
  embed(step);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    attention_layer(step, layer);
    mlp_layer(layer, tokens);
  }
  head(step, logits, hidden);
}

namespace {

void check_range(std::span<const std::int32_t> values, std::int64_t end, const char* name) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] < 0 || values[i] >= end)
      throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) +
                                  "] = " + std::to_string(values[i]) + " is outside [0, " +
                                  std::to_string(end) + ")");
}

}  // namespace

void Decoder::validate(const StepInput& step) const {
  if (!sealed_) throw std::logic_error("forward before seal()");
  if (cache_.num_blocks() == 0) throw std::logic_error("forward before allocate_kv()");
  const std::size_t tokens = step.input_ids.size();
  if (step.positions.size() != tokens || step.slots.size() != tokens)
    throw std::invalid_argument("input_ids, positions and slot_mapping differ in length");
  const std::int64_t slots = std::int64_t{cache_.num_blocks()} * cache_.block_size();
  check_range(step.input_ids, config_.vocab_size, "input_ids");
  check_range(step.positions, config_.learned_positions ? config_.context_length : INT32_MAX,
              "positions");
  check_range(step.slots, slots, "slot_mapping");
  check_range(step.logit_rows, tokens, "logit_rows");
  check_range(step.hidden_rows, tokens, "hidden_rows");
  // More rows than tokens would not fit the work space.
  if (step.logit_rows.size() > tokens) throw std::invalid_argument("more logit_rows than tokens");
  validate_sequences(step);
}

void Decoder::validate_sequences(const StepInput& step) const {
  if (step.cu_seqlens.empty() || step.cu_seqlens.front() != 0 ||
      step.cu_seqlens.back() != static_cast<std::int32_t>(step.input_ids.size()))
    throw std::invalid_argument("cu_seqlens must run from 0 to the number of tokens");
  const std::size_t sequences = step.cu_seqlens.size() - 1;
  if (step.context_lens.size() != sequences ||
      step.block_table.size() != sequences * step.table_width)
    throw std::invalid_argument("context_lens or block_table does not match cu_seqlens");
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::int64_t tokens = std::int64_t{step.cu_seqlens[s + 1]} - step.cu_seqlens[s];
    const std::int64_t length = step.context_lens[s];
    const std::int64_t blocks = (length + cache_.block_size() - 1) / cache_.block_size();
    if (tokens < 0 || tokens > length || blocks > step.table_width)
      throw std::invalid_argument(
          "sequence " + std::to_string(s) + " has " + std::to_string(tokens) + " tokens, context " +
          std::to_string(length) + " and a block table of " + std::to_string(step.table_width));
    check_range(step.block_table.subspan(s * step.table_width, blocks), cache_.num_blocks(),
                "block_table");
  }
}

}  // namespace pyserve
