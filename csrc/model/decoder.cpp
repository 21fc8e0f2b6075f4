#include "model/decoder.h"

#include <algorithm>
#include <bit>
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
      attention_(kernels, config_.num_heads) {}

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
  weights_.gather();
  sealed_ = true;
}

void Decoder::allocate_kv(int num_blocks, int block_size, KvType type, bool prefault) {
  if (num_blocks <= 0 || block_size <= 0)
    throw std::invalid_argument("num_blocks and block_size must be positive");
  if (std::int64_t{num_blocks} * block_size > INT32_MAX)
    throw std::invalid_argument("num_blocks * block_size must fit 32 bits: slots are int32");
  prefault_.stop();
  cache_ = KvCache();
  cache_ = KvCache(kernels_, type, config_.num_layers, config_.num_kv_heads, config_.head_dim,
                   num_blocks, block_size);
  if (prefault) prefault_.start(cache_.memory());
}

void Decoder::await_kv() { prefault_.await(); }

// Calls body(row, thread) for every row.
template <typename Body>
void Decoder::for_rows(int rows, int row_floats, const Body& body) {
  const int per_item = std::max(1, kFloatsPerItem / row_floats);
  shared_pool().run((rows + per_item - 1) / per_item, [&](int item, int thread) {
    const int end = std::min(rows, (item + 1) * per_item);
    for (int row = item * per_item; row < end; ++row) body(row, thread);
  });
}

void Decoder::reserve(int tokens) {
  const auto matrix = [](std::ptrdiff_t rows, std::ptrdiff_t columns) {
    // An odd number of cache lines a row: rows of a tile do not fall into one cache set.
    const std::ptrdiff_t stride = (round_up(columns, 16) / 16 | 1) * 16;
    return Matrix{Buffer(rows * stride * sizeof(float)), stride};
  };
  const int threads = shared_pool().size(), hidden = config_.hidden_size;
  if (threads > row_work_threads_) row_work_ = matrix(row_work_threads_ = threads, hidden);
  if (tokens <= capacity_) return;
  capacity_ = tokens;
  const int inner = config_.intermediate_size * (config_.gated_mlp ? 2 : 1);
  residual_ = matrix(tokens, config_.hidden_size);
  normed_ = matrix(tokens, config_.hidden_size);
  qkv_ = matrix(tokens, config_.q_size() + 2 * config_.kv_size());
  attended_ = matrix(tokens, config_.q_size());
  inner_ = matrix(tokens, inner);
  sublayer_ = matrix(tokens, config_.hidden_size);
  angles_ = matrix(std::ptrdiff_t(config_.ropes.size()) * tokens, config_.head_dim);
  const int widest = std::max({hidden, config_.q_size(), config_.intermediate_size});
  narrow_.reserve(tokens, widest);
}

void Decoder::compute_angles(const StepInput& step) {
  const int tokens = step.tokens(), half = config_.head_dim / 2;
  const Range range(Op::angles);
  for (std::size_t r = 0; r < config_.ropes.size(); ++r) {
    const RopeConfig& rope = config_.ropes[r];
    for_rows(tokens, 64 * half, [&](int token, int) {
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
  const Entry first = {weights_.layers[0].attn_norm, weights_.layers[0].qkv};
  const Range range(Op::embed, [&] { return row_cost(3.0 * step.tokens() * hidden, 2); });
  for_rows(step.tokens(), 8 * hidden, [&](int token, int thread) {
    float* row = residual_.row(token);
    weights_.embed.read_row(step.input_ids[token], row);
    if (config_.embedding_scale != 1.0f)
      for (int i = 0; i < hidden; ++i) row[i] *= config_.embedding_scale;
    if (config_.learned_positions)
      kernels_.add(row, weights_.positions.data() + std::ptrdiff_t{step.positions[token]} * hidden,
                   hidden);
    enter_row(first, token, token, thread);
  });
}

void Decoder::normalize_row(const NormWeight& norm, const float* from, float* to) const {
  if (config_.norm == Norm::rms)
    kernels_.rms_norm(from, norm.weight.data(), config_.norm_eps, config_.hidden_size, to);
  else
    kernels_.layer_norm(from, norm.weight.data(), norm.bias.data(), config_.norm_eps,
                        config_.hidden_size, to);
}

// Row `to` of a projection's input: the norm of row `from` of the residual, in the kinds of numbers
// that the projection takes.
void Decoder::enter_row(const Entry& entry, int from, int to, int thread) {
  const Projection& next = entry.projection;
  float* normed = next.takes_floats() ? normed_.row(to) : row_work_.row(thread);
  normalize_row(entry.norm, residual_.row(from), normed);
  next.prepare_row(normed, to, narrow_);
}

// residual += sublayer, normalized first where the model has post norms; and the next sublayer's
// input while the row is at hand.
void Decoder::add_residual(const NormWeight& post_norm, int rows,
                           const std::optional<Entry>& next) {
  const double passes = next ? 4 : 3;
  const Range range(Op::residual, [&] { return row_cost(passes * rows * config_.hidden_size, 1); });
  for_rows(rows, 4 * config_.hidden_size, [&](int row, int thread) {
    float* from = sublayer_.row(row);
    if (config_.post_norms) normalize_row(post_norm, from, from);
    kernels_.add(residual_.row(row), from, config_.hidden_size);
    if (next) enter_row(*next, row, row, thread);
  });
}

// Cosines and sines of a token's position, null in a layer without rotation.
const float* Decoder::angles_of(int layer, int token, int tokens) const {
  const int rope = config_.layer_rope[layer];
  return rope < 0 ? nullptr : angles_.row(std::ptrdiff_t{rope} * tokens + token);
}

// Norms, rotates and scales a query or key head in place.
void Decoder::position_head(float* head, const std::vector<float>& norm, const float* angles,
                            float scale) const {
  const int dim = config_.head_dim, half = dim / 2;
  if (config_.qk_norm) kernels_.rms_norm(head, norm.data(), config_.norm_eps, dim, head);
  if (angles != nullptr)
    kernels_.rotate(head, angles, angles + half, half, scale);
  else
    for (int i = 0; i < dim; ++i) head[i] *= scale;
}

void Decoder::position_queries(int layer, int row, const float* angles) {
  float* queries = qkv_.row(row);
  for (int h = 0; h < config_.num_heads; ++h)
    position_head(queries + h * config_.head_dim, weights_.layers[layer].q_norm, angles,
                  config_.attention_scale);
}

// And writes the token's keys and values into its slot.
void Decoder::position_keys(const StepInput& step, int layer, int token) {
  float* keys = qkv_.row(token) + config_.q_size();
  const float* angles = angles_of(layer, token, step.tokens());
  for (int h = 0; h < config_.num_kv_heads; ++h)
    position_head(keys + h * config_.head_dim, weights_.layers[layer].k_norm, angles, 1.0f);
  cache_.write(layer, step.slots[token], keys, keys + config_.kv_size());
}

void Decoder::plan_attention(const StepInput& step) {
  attention_.plan(cache_.layout(), shared_pool().size(), step.cu_seqlens, step.context_lens,
                  step.block_table.data(), step.table_width);
}

void Decoder::attend(const StepInput& step, int layer) {
  const Range range(Op::attention, [&] { return attention_cost(step, layer); });
  attention_.run(shared_pool(), cache_, layer, config_.layer_window[layer], qkv_.begin(),
                 qkv_.stride, attended_.begin(), attended_.stride);
}

void Decoder::activate(float* row) const {
  const int n = config_.intermediate_size;
  const bool silu = config_.activation == Activation::silu;
  if (config_.gated_mlp)
    (silu ? kernels_.silu_mul : kernels_.gelu_mul)(row, row + n, n);
  else
    (silu ? kernels_.silu : kernels_.gelu)(row, n);
}

// From a layer's attention on, for the first rows of the work space.
void Decoder::finish_layer(int layer, int rows) {
  const LayerWeights& w = weights_.layers[layer];
  w.o.prepare(shared_pool(), attended_.begin(), attended_.stride, rows, narrow_);
  project(Op::o, w.o, attended_, rows, sublayer_.begin(), sublayer_.stride);
  add_residual(w.attn_post_norm, rows, Entry{w.mlp_norm, w.gate_up});
  project(Op::gate_up, w.gate_up, normed_, rows, inner_.begin(), inner_.stride);
  {
    const double floats = double(rows) * (w.gate_up.out() + config_.intermediate_size);
    const Range range(Op::activation, [&] { return row_cost(floats, 6); });
    for_rows(rows, 4 * config_.intermediate_size, [&](int row, int) {
      activate(inner_.row(row));
      w.down.prepare_row(inner_.row(row), row, narrow_);
    });
  }
  project(Op::down, w.down, inner_, rows, sublayer_.begin(), sublayer_.stride);
  if (layer + 1 == config_.num_layers) return add_residual(w.mlp_post_norm, rows, std::nullopt);
  const LayerWeights& next = weights_.layers[layer + 1];
  add_residual(w.mlp_post_norm, rows, Entry{next.attn_norm, next.qkv});
}

void Decoder::run_layer(const StepInput& step, int layer) {
  const Projection& qkv = weights_.layers[layer].qkv;
  const int tokens = step.tokens();
  project(Op::qkv, qkv, normed_, tokens, qkv_.begin(), qkv_.stride);
  {
    const Range range(Op::rotary, [&] { return row_cost(2.0 * tokens * qkv.out(), 1.5); });
    for_rows(tokens, 4 * qkv.out(), [&](int token, int) {
      position_queries(layer, token, angles_of(layer, token, tokens));
      position_keys(step, layer, token);
    });
  }
  attend(step, layer);
  finish_layer(layer, tokens);
}

// Tokens that nobody wants an output of are through when their keys and values are written. The
// others move up to the first rows.
void Decoder::run_last_layer(const StepInput& step) {
  const int layer = config_.num_layers - 1, tokens = step.tokens();
  if (wanted_.all()) return run_layer(step, layer);
  const LayerWeights& w = weights_.layers[layer];
  const int q = config_.q_size(), kv = 2 * config_.kv_size(), hidden = config_.hidden_size;
  project(Op::qkv, w.qkv, normed_, tokens, qkv_.begin(), qkv_.stride, q, w.qkv.out());
  {
    const Range range(Op::rotary, [&] { return row_cost(2.0 * tokens * kv, 1.5); });
    for_rows(tokens, 4 * kv, [&](int token, int) { position_keys(step, layer, token); });
  }
  const auto wanted = wanted_.tokens();
  const int rows = static_cast<int>(wanted.size());
  if (rows == 0) return;
  {
    const Range range(Op::norm, [&] { return row_cost(3.0 * rows * hidden, 2); });
    for (int i = 0; i < rows; ++i)  // no row is overwritten before it has been read
      if (wanted[i] != i) std::copy_n(residual_.row(wanted[i]), hidden, residual_.row(i));
    for_rows(rows, 4 * hidden,
             [&](int row, int thread) { enter_row({w.attn_norm, w.qkv}, row, row, thread); });
  }
  project(Op::qkv, w.qkv, normed_, rows, qkv_.begin(), qkv_.stride, 0, q);
  {
    const Range range(Op::rotary, [&] { return row_cost(2.0 * rows * q, 1.5); });
    for_rows(rows, 4 * q, [&](int row, int) {
      position_queries(layer, row, angles_of(layer, wanted[row], tokens));
    });
  }
  const StepInput wanted_step = wanted_.step();
  plan_attention(wanted_step);
  attend(wanted_step, layer);
  finish_layer(layer, rows);
}

void Decoder::head(float* logits, float* hidden) {
  const int size = config_.hidden_size;
  const auto logits_at = wanted_.logits_at(), hidden_at = wanted_.hidden_at();
  const int rows = static_cast<int>(logits_at.size());
  {
    const Range range(Op::norm,
                      [&] { return row_cost(2.0 * (rows + double(hidden_at.size())) * size, 2); });
    for_rows(static_cast<int>(hidden_at.size()), 2 * size, [&](int i, int) {
      normalize_row(weights_.final_norm, residual_.row(hidden_at[i]),
                    hidden + std::ptrdiff_t{i} * size);
    });
    for_rows(rows, 4 * size, [&](int i, int thread) {
      enter_row({weights_.final_norm, weights_.head()}, logits_at[i], i, thread);
    });
  }
  project(Op::lm_head, weights_.head(), normed_, rows, logits, config_.vocab_size);
}

// Of rows that are in narrow_ already, where the weight takes them so.
void Decoder::project(Op op, const Projection& weight, const Matrix& from, int rows, float* to,
                      std::ptrdiff_t ldt, int begin, int end) {
  const Range range(op, [&] { return weight.cost(rows, begin, end); });
  const ProjectionInput input = {from.begin(), from.stride, &narrow_};
  weight.apply(shared_pool(), input, rows, to, ldt, begin, end);
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
  const double operations = 4 * pairs * width;
  const bool tiles = kernels_.kv_tiles && cache_.layout().type == KvType::bfloat16;
  return {.memory_bytes = keys * cache_.layout().layer_bytes / cache_.block_size(),
          .cached_bytes = 2 * step.cu_seqlens.back() * width * sizeof(float),
          .float_operations = tiles ? 0 : operations,
          .tile_operations = tiles ? operations : 0};
}

std::shared_ptr<Buffer> Decoder::logits_room(int rows) {
  // Whole powers of two, so that a batch that grows row by row finds room most of the time.
  const std::size_t room = std::bit_ceil(static_cast<std::size_t>(std::max(rows, 1)));
  const std::size_t bytes = room * config_.vocab_size * sizeof(float);
  if (logits_ == nullptr || logits_.use_count() > 1 || logits_->bytes() < bytes) {
    logits_.reset();
    logits_ = std::make_shared<Buffer>(bytes);
  }
  return logits_;
}

void Decoder::forward(const StepInput& step, float* logits, float* hidden) {
  const Range range(Op::forward);
  validate(step);
  reserve(step.tokens());
  wanted_.plan(step);
  plan_attention(step);
  compute_angles(step);
  embed(step);
  for (int layer = 0; layer + 1 < config_.num_layers; ++layer) run_layer(step, layer);
  run_last_layer(step);
  head(logits, hidden);
}

}  // namespace pyserve
