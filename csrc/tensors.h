// Tensors at the edge, spans inside: checked views of dense CPU tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>

namespace pyserve {

// The elements of `tensor`, which must be a contiguous CPU tensor of T's dtype with `dims`
// dimensions.
template <typename T>
std::span<T> span_of(const at::Tensor& tensor, const char* name, int64_t dims = 1) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous() && tensor.dim() == dims &&
                        tensor.scalar_type() == c10::CppTypeToScalarType<T>::value,
                    name, " must be a contiguous ", c10::CppTypeToScalarType<T>::value,
                    " tensor on the CPU with ", dims, " dimension(s), not ", tensor.toString(), " ",
                    tensor.sizes());
  return {tensor.data_ptr<T>(), size_t(tensor.numel())};
}

// The same of int32, one dimension.
inline std::span<const int32_t> ints(const at::Tensor& tensor, const char* name) {
  return span_of<int32_t>(tensor, name);
}

// A copy, int32.
inline at::Tensor int_tensor(std::span<const int32_t> values) {
  at::Tensor tensor = at::empty({int64_t(values.size())}, at::kInt);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int32_t>());
  return tensor;
}

}  // namespace pyserve
