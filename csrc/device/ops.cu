// The device room's ops on CUDA.
#include "device/draw_op.h"
#include "device/launch.cuh"
#include "device/layer.h"
#include "device/ops.h"

namespace pyserve::cuda {

at::Tensor normalize(const at::Tensor& x, const std::optional<at::Tensor>& addend,
                     const at::Tensor& weight, const std::optional<at::Tensor>& bias, double eps,
                     at::ScalarType dtype) {
  return normalize_on<OnCuda>(x, addend, weight, bias, eps, dtype);
}

void place_heads(const at::Tensor& qkv, const at::Tensor& keys, const at::Tensor& values,
                 const at::Tensor& positions, const at::Tensor& slots,
                 const std::optional<at::Tensor>& rope, const std::optional<at::Tensor>& q_norm,
                 const std::optional<at::Tensor>& k_norm, double eps, int64_t num_heads) {
  place_heads_on<OnCuda>(qkv, keys, values, positions, slots, rope, q_norm, k_norm, eps, num_heads);
}

at::Tensor activate(const at::Tensor& x, bool gated, int64_t kind) {
  return activate_on<OnCuda>(x, gated, kind);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> draw(
    const at::Tensor& logits, const at::Tensor& wishes, int64_t width) {
  return draw_on<OnCuda>(logits, wishes, width);
}

void feed_forward(const at::Tensor& tokens, const at::Tensor& input_ids,
                  const at::Tensor& context_lens) {
  feed_forward_on<OnCuda>(tokens, input_ids, context_lens);
}

}  // namespace pyserve::cuda
