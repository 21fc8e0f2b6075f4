// What every CUDA file of the room needs: the current stream, and checked arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace pyserve::cuda {

inline constexpr int kThreads = 256;

inline unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// Device pointer of a dense int32 tensor with `dims` dimensions on `device`.
inline const int32_t* ints(const at::Tensor& tensor, const char* name, int64_t dims,
                           const at::Device& device) {
  TORCH_CHECK_VALUE(tensor.device() == device && tensor.is_contiguous() && tensor.dim() == dims &&
                        tensor.scalar_type() == at::kInt,
                    name, " must be a contiguous int32 tensor on ", device, " with ", dims,
                    " dimension(s)");
  return tensor.const_data_ptr<int32_t>();
}

}  // namespace pyserve::cuda
