// The batch room's tensor ops, as bindings.cpp registers them: one set for the CPU, one for CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <optional>
#include <tuple>

namespace pyserve {

namespace cpu {
at::Tensor pad(const at::Tensor& flat, const at::Tensor& cu_seqlens, const at::Scalar& value,
               std::optional<int64_t> max_len);
at::Tensor unpad(const at::Tensor& rect, const at::Tensor& cu_seqlens,
                 std::optional<int64_t> num_tokens);
std::tuple<at::Tensor, at::Tensor> locate(const at::Tensor& cu_seqlens,
                                          const at::Tensor& context_lens,
                                          const at::Tensor& block_table, int64_t block_size,
                                          int64_t num_tokens);
}  // namespace cpu

namespace cuda {
at::Tensor pad(const at::Tensor& flat, const at::Tensor& cu_seqlens, const at::Scalar& value,
               std::optional<int64_t> max_len);
at::Tensor unpad(const at::Tensor& rect, const at::Tensor& cu_seqlens,
                 std::optional<int64_t> num_tokens);
std::tuple<at::Tensor, at::Tensor> locate(const at::Tensor& cu_seqlens,
                                          const at::Tensor& context_lens,
                                          const at::Tensor& block_table, int64_t block_size,
                                          int64_t num_tokens);
}  // namespace cuda

}  // namespace pyserve
