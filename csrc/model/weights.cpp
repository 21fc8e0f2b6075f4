#include "model/weights.h"

#include <stdexcept>

namespace pyserve {

Weights::Weights(const DecoderConfig& config, DType dtype, const Kernels& kernels)
    : tied_(config.tie_embeddings) {
  const int hidden = config.hidden_size;
  embed = Projection(kernels, dtype, config.vocab_size, hidden);
  add_linear("embed", embed, config.vocab_size, 0);
  slots_.erase("embed.bias");
  if (config.learned_positions)
    add_vector("positions.weight", positions, {config.context_length, hidden});
  layers.resize(config.num_layers);
  for (int i = 0; i < config.num_layers; ++i) add_layer(i, config, dtype, kernels);
  add_norm("final_norm", final_norm, hidden, config.norm == Norm::layer);
  if (!tied_) {
    lm_head = Projection(kernels, dtype, config.vocab_size, hidden);
    add_linear("lm_head", lm_head, config.vocab_size, 0);
    slots_.erase("lm_head.bias");
  }
}

void Weights::add_layer(int index, const DecoderConfig& config, DType dtype,
                        const Kernels& kernels) {
  LayerWeights& layer = layers[index];
  const std::string prefix = "layers." + std::to_string(index) + ".";
  const int hidden = config.hidden_size, inner = config.intermediate_size;
  const int q = config.q_size(), kv = config.kv_size();
  const bool bias = config.norm == Norm::layer;
  add_norm(prefix + "attn_norm", layer.attn_norm, hidden, bias);
  add_norm(prefix + "mlp_norm", layer.mlp_norm, hidden, bias);
  if (config.post_norms) {
    add_norm(prefix + "attn_post_norm", layer.attn_post_norm, hidden, bias);
    add_norm(prefix + "mlp_post_norm", layer.mlp_post_norm, hidden, bias);
  }
  if (config.qk_norm) {
    add_vector(prefix + "q_norm.weight", layer.q_norm, {config.head_dim});
    add_vector(prefix + "k_norm.weight", layer.k_norm, {config.head_dim});
  }
  layer.qkv = Projection(kernels, dtype, q + 2 * kv, hidden);
  add_linear(prefix + "q", layer.qkv, q, 0);
  add_linear(prefix + "k", layer.qkv, kv, q);
  add_linear(prefix + "v", layer.qkv, kv, q + kv);
  layer.o = Projection(kernels, dtype, hidden, q);
  add_linear(prefix + "o", layer.o, hidden, 0);
  const int gate = config.gated_mlp ? inner : 0;
  layer.gate_up = Projection(kernels, dtype, gate + inner, hidden);
  if (config.gated_mlp) add_linear(prefix + "gate", layer.gate_up, inner, 0);
  add_linear(prefix + "up", layer.gate_up, inner, gate);
  layer.down = Projection(kernels, dtype, hidden, inner);
  add_linear(prefix + "down", layer.down, hidden, 0);
}

void Weights::add_vector(const std::string& name, std::vector<float>& to,
                         std::vector<std::int64_t> shape) {
  std::size_t size = 1;
  for (std::int64_t n : shape) size *= static_cast<std::size_t>(n);
  slots_[name] = {.shape = std::move(shape),
                  .required = true,
                  .copy = [&to, size](const float* from) { to.assign(from, from + size); }};
}

void Weights::add_norm(const std::string& name, NormWeight& norm, int size, bool bias) {
  add_vector(name + ".weight", norm.weight, {size});
  if (bias) add_vector(name + ".bias", norm.bias, {size});
}

void Weights::add_linear(const std::string& name, Projection& linear, int rows, int at) {
  slots_[name + ".weight"] = {
      .shape = {rows, linear.in()},
      .required = true,
      .copy = [&linear, rows,
               at](const float* from) { linear.pack(shared_pool(), from, rows, at); },
      .copy_blocks =
          [&linear, rows, at](const StoredFormat& format, const std::uint8_t* from) {
            linear.pack(shared_pool(), format, from, rows, at);
          }};
  slots_[name + ".bias"] = {
      .shape = {rows}, .required = false, .copy = [&linear, rows, at](const float* from) {
        linear.set_bias({from, static_cast<std::size_t>(rows)}, at);
      }};
}

namespace {

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace

Weights::Slot* Weights::slot_for(const std::string& name, std::span<const std::int64_t> shape) {
  const auto found = slots_.find(name);
  if (found == slots_.end()) {
    unexpected_.push_back(name);
    return nullptr;
  }
  Slot& slot = found->second;
  if (!std::equal(shape.begin(), shape.end(), slot.shape.begin(), slot.shape.end()))
    throw std::invalid_argument("weight " + name + " has shape " + shape_text(shape) +
                                ", expected " + shape_text(slot.shape));
  return &slot;
}

void Weights::load(const std::string& name, std::span<const std::int64_t> shape,
                   const float* data) {
  if (Slot* slot = slot_for(name, shape)) {
    slot->copy(data);
    slot->loaded = true;
  }
}

void Weights::load(const std::string& name, std::span<const std::int64_t> shape,
                   const StoredFormat& format, const std::uint8_t* blocks) {
  if (Slot* slot = slot_for(name, shape)) {
    if (!slot->copy_blocks) throw std::invalid_argument("weight " + name + " cannot be quantised");
    slot->copy_blocks(format, blocks);
    slot->loaded = true;
  }
}

void Weights::check() const {
  std::string missing, unexpected;
  for (const auto& [name, slot] : slots_)
    if (slot.required && !slot.loaded) missing += (missing.empty() ? "" : ", ") + name;
  for (const std::string& name : unexpected_) unexpected += (unexpected.empty() ? "" : ", ") + name;
  if (missing.empty() && unexpected.empty()) return;
  throw std::invalid_argument(
      "weights do not fit the model:" + (missing.empty() ? "" : " missing " + missing) +
      (missing.empty() || unexpected.empty() ? "" : ";") +
      (unexpected.empty() ? "" : " unexpected " + unexpected));
}

void Weights::gather() {
  std::size_t room = 0;
  for (LayerWeights& layer : layers)
    for (const Projection* projection : layer.projections())
      room += projection->bytes() + projection->parts() * Buffer::kAlignment;
  gathered_ = Buffer(room);
  auto* place = gathered_.as<std::byte>();
  for (LayerWeights& layer : layers)
    for (Projection* projection : layer.projections()) place = projection->move_to(place);
}

std::size_t Weights::bytes() const {
  const auto vector_bytes = [](const NormWeight& norm) {
    return (norm.weight.size() + norm.bias.size()) * sizeof(float);
  };
  std::size_t total =
      embed.bytes() + lm_head.bytes() + positions.size() * sizeof(float) + vector_bytes(final_norm);
  for (const LayerWeights& layer : layers) {
    for (const Projection* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
      total += linear->bytes();
    for (const NormWeight* norm :
         {&layer.attn_norm, &layer.attn_post_norm, &layer.mlp_norm, &layer.mlp_post_norm})
      total += vector_bytes(*norm);
    total += (layer.q_norm.size() + layer.k_norm.size()) * sizeof(float);
  }
  return total;
}

}  // namespace pyserve
