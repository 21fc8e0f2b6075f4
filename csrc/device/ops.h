// The device room's tensor ops, as bindings.cpp registers them: one set for the CPU, one for CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#define PYSERVE_DEVICE_OPS                                                                         \
  at::Tensor normalize(const at::Tensor& x, const std::optional<at::Tensor>& addend,               \
                       const at::Tensor& weight, const std::optional<at::Tensor>& bias,            \
                       double eps, at::ScalarType dtype);                                          \
  void place_heads(const at::Tensor& qkv, const at::Tensor& keys, const at::Tensor& values,        \
                   const at::Tensor& positions, const at::Tensor& slots,                           \
                   const std::optional<at::Tensor>& rope, const std::optional<at::Tensor>& q_norm, \
                   const std::optional<at::Tensor>& k_norm, double eps, int64_t num_heads);        \
  at::Tensor activate(const at::Tensor& x, bool gated, int64_t kind);                              \
  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> draw(                     \
      const at::Tensor& logits, const at::Tensor& wishes, int64_t width);                          \
  void feed_forward(const at::Tensor& tokens, const at::Tensor& input_ids,                         \
                    const at::Tensor& context_lens);

namespace pyserve {
namespace cpu {
PYSERVE_DEVICE_OPS
}
namespace cuda {
PYSERVE_DEVICE_OPS
}
}  // namespace pyserve

#undef PYSERVE_DEVICE_OPS
