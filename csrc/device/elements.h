// Element types of activations and KV, and the choice among them at run time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

namespace pyserve {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<float>) or f(TypeTag<c10::BFloat16>). Raises ValueError for any other dtype.
template <typename F>
auto with_element(c10::ScalarType dtype, const char* name, const F& f) {
  if (dtype == at::kFloat) return f(TypeTag<float>{});
  TORCH_CHECK_VALUE(dtype == at::kBFloat16, name, " must be float32 or bfloat16, not ", dtype);
  return f(TypeTag<c10::BFloat16>{});
}

// Raises ValueError unless `tensor` is dense, of this dtype and number of dimensions, on `device`.
inline void check_dense(const at::Tensor& tensor, const char* name, const at::Device& device,
                        c10::ScalarType dtype, int64_t dims) {
  TORCH_CHECK_VALUE(tensor.device() == device && tensor.is_contiguous() && tensor.dim() == dims &&
                        tensor.scalar_type() == dtype,
                    name, " must be a contiguous ", dtype, " tensor on ", device, " with ", dims,
                    " dimension(s), not ", tensor.toString(), " ", tensor.sizes());
}

// The data of an optional vector of float32 [size], or null.
inline const float* floats_or_null(const std::optional<at::Tensor>& tensor, const char* name,
                                   const at::Device& device, int64_t size) {
  if (!tensor) return nullptr;
  check_dense(*tensor, name, device, at::kFloat, 1);
  TORCH_CHECK_VALUE(tensor->size(0) == size, name, " must have ", size, " elements");
  return tensor->const_data_ptr<float>();
}

}  // namespace pyserve
