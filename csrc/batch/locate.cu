// Position and KV slot of every token of a step, on CUDA: only the small per-sequence arrays are
// copied to the device, and a loop that feeds sampled tokens forward there needs no copy at all.
#include <ATen/ops/empty.h>

#include "batch/cuda.h"
#include "batch/indexing.h"
#include "batch/ops.h"

namespace pyserve::cuda {
namespace {

__global__ void locate_tokens(const int32_t* cu_seqlens, const int32_t* context_lens,
                              const int32_t* block_table, int32_t num_seqs, int64_t width,
                              int32_t block_size, int32_t num_tokens, int32_t* positions,
                              int32_t* slots) {
  const auto token = int32_t(blockIdx.x * blockDim.x + threadIdx.x);
  if (token >= num_tokens) return;
  const int32_t s = sequence_of(cu_seqlens, num_seqs, token);
  const int32_t position = position_of(context_lens[s], cu_seqlens[s + 1], token);
  positions[token] = position;
  slots[token] = slot_of(block_table + s * width, block_size, position);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> locate(const at::Tensor& cu_seqlens,
                                          const at::Tensor& context_lens,
                                          const at::Tensor& block_table, int64_t block_size,
                                          int64_t num_tokens) {
  const at::Device device = cu_seqlens.device();
  const c10::cuda::CUDAGuard guard(device);
  const int32_t* starts = ints(cu_seqlens, "cu_seqlens", 1, device);
  const int32_t* lengths = ints(context_lens, "context_lens", 1, device);
  const int32_t* table = ints(block_table, "block_table", 2, device);
  const at::Tensor positions = at::empty({num_tokens}, cu_seqlens.options());
  const at::Tensor slots = at::empty({num_tokens}, cu_seqlens.options());
  if (num_tokens == 0) return {positions, slots};
  locate_tokens<<<blocks_for(num_tokens), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      starts, lengths, table, int32_t(context_lens.numel()), block_table.size(1),
      int32_t(block_size), int32_t(num_tokens), positions.mutable_data_ptr<int32_t>(),
      slots.mutable_data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {positions, slots};
}

}  // namespace pyserve::cuda
