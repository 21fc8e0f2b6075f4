// What a decoder layer needs beside matrix products and attention: bodies, and the ops around them,
// written once for both devices (layer.cpp and layer.cu instantiate them).
#pragma once

#include <ATen/ops/empty.h>

#include <cmath>
#include <optional>

#include "device/elements.h"
#include "device/host_device.h"

namespace pyserve {

// RMSNorm, or LayerNorm where there is a bias, of one row of x, to which `addend` is added in place
// first. Arithmetic is float32.
template <typename X, typename Addend, typename Out>
struct NormalizeRow {
  static constexpr int kLanes = 256;
  X* x;
  const Addend* addend;  // or null
  const float *weight, *bias;
  float eps;
  int64_t size;
  Out* out;

  template <typename Lanes>
  PYSERVE_HOST_DEVICE void operator()(const Lanes& lanes, int64_t row) const {
    X* from = x + row * size;
    float total = 0;
    for (int64_t i = lanes.index; i < size; i += lanes.count) {
      if (addend != nullptr) from[i] = X(float(from[i]) + float(addend[row * size + i]));
      total += float(from[i]);
    }
    const float mean = bias != nullptr ? lanes.sum(total) / float(size) : 0.0f;
    float squares = 0;
    for (int64_t i = lanes.index; i < size; i += lanes.count) {
      const float distance = float(from[i]) - mean;
      squares += distance * distance;
    }
    const float scale = 1.0f / std::sqrt(lanes.sum(squares) / float(size) + eps);
    for (int64_t i = lanes.index; i < size; i += lanes.count) {
      const float value = (float(from[i]) - mean) * scale * weight[i];
      out[row * size + i] = Out(bias != nullptr ? value + bias[i] : value);
    }
  }
};

// One head of one token: query heads are normed and rotated in place, key heads too and written to
// their page, value heads written to theirs. Row token * (heads + 2 kv_heads) + head.
template <typename T>
struct PlaceHead {
  static constexpr int kLanes = 32;
  T* qkv;             // [T, heads + 2 kv_heads, dim]
  T *keys, *values;   // [slots, kv_heads, dim]
  const float* rope;  // [positions, dim]: cosines, then sines; or null
  const int32_t *positions, *slots;
  const float *q_norm, *k_norm;  // [dim]; or null
  float eps;
  int heads, kv_heads, dim;

  template <typename Lanes>
  PYSERVE_HOST_DEVICE void operator()(const Lanes& lanes, int64_t row) const {
    const int head = int(row % (heads + 2 * kv_heads));
    const int64_t token = row / (heads + 2 * kv_heads);
    T* at = qkv + row * dim;
    const int64_t slot = int64_t(slots[token]) * kv_heads;
    if (head >= heads + kv_heads) {
      T* page = values + (slot + head - heads - kv_heads) * dim;
      for (int i = lanes.index; i < dim; i += lanes.count) page[i] = at[i];
      return;
    }
    T* page = head < heads ? nullptr : keys + (slot + head - heads) * dim;
    position(lanes, at, page, head < heads ? q_norm : k_norm, token);
  }

 private:
  template <typename Lanes>
  PYSERVE_HOST_DEVICE void position(const Lanes& lanes, T* at, T* page, const float* norm,
                                    int64_t token) const {
    float scale = 1;
    if (norm != nullptr) {
      float squares = 0;
      for (int i = lanes.index; i < dim; i += lanes.count) squares += float(at[i]) * float(at[i]);
      scale = 1.0f / std::sqrt(lanes.sum(squares) / float(dim) + eps);
    }
    const int half = dim / 2;
    const float* cosine = rope == nullptr ? nullptr : rope + int64_t(positions[token]) * dim;
    for (int i = lanes.index; i < half; i += lanes.count) {
      float a = float(at[i]), b = float(at[i + half]);
      if (norm != nullptr) {
        a = a * scale * norm[i];
        b = b * scale * norm[i + half];
      }
      if (cosine != nullptr) {
        const float c = cosine[i], s = cosine[i + half], turned = a * c - b * s;
        b = b * c + a * s;
        a = turned;
      }
      at[i] = T(a);
      at[i + half] = T(b);
      if (page != nullptr) {
        page[i] = T(a);
        page[i + half] = T(b);
      }
    }
  }
};

enum class GateKind : int64_t { silu = 0, gelu_tanh = 1 };

// One output: activation(x), or activation(gate) * up where rows of x are gate, then up.
template <typename T>
struct Activate {
  const T* x;
  T* out;
  int64_t size;  // of a row of out
  bool gated;
  GateKind kind;

  PYSERVE_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t row = index / size, column = index % size;
    const T* from = x + row * size * (gated ? 2 : 1) + column;
    const float value = float(*from);
    // 0.5 v (1 + tanh(u)) == v / (1 + e^-2u), u = sqrt(2/pi) (v + 0.044715 v^3).
    const float exponent = kind == GateKind::silu
                               ? -value
                               : -1.5957691216f * (value + 0.044715f * value * value * value);
    const float active = value / (1.0f + std::exp(exponent));
    out[index] = T(gated ? active * float(from[size]) : active);
  }
};

// The next decode step's input, from what the last one drew: row s goes on with tokens[s].
struct FeedForward {
  const int32_t* tokens;
  int32_t *input_ids, *context_lens;

  PYSERVE_HOST_DEVICE void operator()(int64_t row) const {
    input_ids[row] = tokens[row];
    ++context_lens[row];
  }
};

// --- the ops; schemas and meaning in bindings.cpp ----------------------------------------------

template <typename Device>
at::Tensor normalize_on(const at::Tensor& x, const std::optional<at::Tensor>& addend,
                        const at::Tensor& weight, const std::optional<at::Tensor>& bias, double eps,
                        at::ScalarType dtype) {
  const at::Device device = x.device();
  check_dense(x, "x", device, x.scalar_type(), 2);
  const int64_t size = x.size(1);
  const float* scale = floats_or_null(weight, "weight", device, size);
  const float* shift = floats_or_null(bias, "bias", device, size);
  const at::ScalarType addend_type = addend ? addend->scalar_type() : at::kFloat;
  if (addend) {
    check_dense(*addend, "addend", device, addend_type, 2);
    TORCH_CHECK_VALUE(addend->sizes() == x.sizes(), "x and addend differ in shape");
  }
  const at::Tensor out = at::empty(x.sizes(), x.options().dtype(dtype));
  with_element(x.scalar_type(), "x", [&](auto x_tag) {
    with_element(addend_type, "addend", [&](auto addend_tag) {
      with_element(dtype, "dtype", [&](auto out_tag) {
        using X = typename decltype(x_tag)::type;
        using Addend = typename decltype(addend_tag)::type;
        using Out = typename decltype(out_tag)::type;
        Device::rows(
            device, x.size(0),
            NormalizeRow<X, Addend, Out>{x.mutable_data_ptr<X>(),
                                         addend ? addend->const_data_ptr<Addend>() : nullptr, scale,
                                         shift, float(eps), size, out.mutable_data_ptr<Out>()});
      });
    });
  });
  return out;
}

template <typename Device>
void place_heads_on(const at::Tensor& qkv, const at::Tensor& keys, const at::Tensor& values,
                    const at::Tensor& positions, const at::Tensor& slots,
                    const std::optional<at::Tensor>& rope, const std::optional<at::Tensor>& q_norm,
                    const std::optional<at::Tensor>& k_norm, double eps, int64_t num_heads) {
  const at::Device device = qkv.device();
  const at::ScalarType dtype = qkv.scalar_type();
  check_dense(qkv, "qkv", device, dtype, 2);
  check_dense(keys, "keys", device, dtype, 4);
  check_dense(values, "values", device, dtype, 4);
  check_dense(positions, "positions", device, at::kInt, 1);
  check_dense(slots, "slots", device, at::kInt, 1);
  const int64_t kv_heads = keys.size(2), dim = keys.size(3), tokens = qkv.size(0);
  TORCH_CHECK_VALUE(values.sizes() == keys.sizes() && dim % 2 == 0 &&
                        qkv.size(1) == (num_heads + 2 * kv_heads) * dim &&
                        positions.size(0) == tokens && slots.size(0) == tokens,
                    "qkv [T, (H + 2 K) D], keys and values [blocks, block_size, K, D] with D even,"
                    " positions and slots [T]");
  if (rope) {
    check_dense(*rope, "rope", device, at::kFloat, 2);
    TORCH_CHECK_VALUE(rope->size(1) == dim, "rope must be [positions, ", dim, "]");
  }
  with_element(dtype, "qkv", [&](auto tag) {
    using T = typename decltype(tag)::type;
    Device::rows(
        device, tokens * (num_heads + 2 * kv_heads),
        PlaceHead<T>{qkv.mutable_data_ptr<T>(), keys.mutable_data_ptr<T>(),
                     values.mutable_data_ptr<T>(), rope ? rope->const_data_ptr<float>() : nullptr,
                     positions.const_data_ptr<int32_t>(), slots.const_data_ptr<int32_t>(),
                     floats_or_null(q_norm, "q_norm", device, dim),
                     floats_or_null(k_norm, "k_norm", device, dim), float(eps), int(num_heads),
                     int(kv_heads), int(dim)});
  });
}

template <typename Device>
at::Tensor activate_on(const at::Tensor& x, bool gated, int64_t kind) {
  const at::Device device = x.device();
  check_dense(x, "x", device, x.scalar_type(), 2);
  TORCH_CHECK_VALUE(kind == 0 || kind == 1, "kind must be 0 (silu) or 1 (gelu_tanh)");
  TORCH_CHECK_VALUE(!gated || x.size(1) % 2 == 0, "gated rows must be even");
  const int64_t size = gated ? x.size(1) / 2 : x.size(1);
  const at::Tensor out = at::empty({x.size(0), size}, x.options());
  with_element(x.scalar_type(), "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    Device::each(device, out.numel(),
                 Activate<T>{x.const_data_ptr<T>(), out.mutable_data_ptr<T>(), size, gated,
                             static_cast<GateKind>(kind)});
  });
  return out;
}

template <typename Device>
void feed_forward_on(const at::Tensor& tokens, const at::Tensor& input_ids,
                     const at::Tensor& context_lens) {
  const at::Device device = tokens.device();
  check_dense(tokens, "tokens", device, at::kInt, 1);
  check_dense(input_ids, "input_ids", device, at::kInt, 1);
  check_dense(context_lens, "context_lens", device, at::kInt, 1);
  TORCH_CHECK_VALUE(input_ids.size(0) >= tokens.size(0) && context_lens.size(0) >= tokens.size(0),
                    "input_ids and context_lens must have an element for each token");
  Device::each(device, tokens.size(0),
               FeedForward{tokens.const_data_ptr<int32_t>(), input_ids.mutable_data_ptr<int32_t>(),
                           context_lens.mutable_data_ptr<int32_t>()});
}

}  // namespace pyserve
