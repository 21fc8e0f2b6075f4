// Ragged to rectangular and back, on CUDA: a thread for each unit of each token, the unit as wide
// as a token's bytes allow. Without max_len or num_tokens the sizes are read from the device, which
// waits for it.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <vector>

#include "batch/cuda.h"
#include "batch/indexing.h"
#include "batch/ops.h"

namespace pyserve::cuda {
namespace {

struct alignas(16) Unit16 {
  uint64_t halves[2];
};

template <typename Unit, bool kToRect>
__global__ void move(const Unit* from, Unit* to, const int32_t* cu_seqlens, int32_t num_seqs,
                     int64_t num_tokens, int64_t width, int64_t units) {
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= num_tokens * units) return;
  const auto token = int32_t(index / units);
  const int32_t s = sequence_of(cu_seqlens, num_seqs, token);
  const int64_t column = token - cu_seqlens[s];
  if (column >= width) return;
  const int64_t in_rect = (s * width + column) * units + index % units;
  if constexpr (kToRect) {
    to[in_rect] = from[index];
  } else {
    to[index] = from[in_rect];
  }
}

struct Move {
  const void* from;
  void* to;
  const int32_t* cu_seqlens;
  int32_t num_seqs;
  int64_t num_tokens, width, token_bytes;
};

template <typename Unit, bool kToRect>
bool launch_in(const Move& m) {
  const auto misaligned = [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % sizeof(Unit);
  };
  if (m.token_bytes % sizeof(Unit) != 0 || misaligned(m.from) || misaligned(m.to)) return false;
  const int64_t units = m.token_bytes / sizeof(Unit);
  move<Unit, kToRect>
      <<<blocks_for(m.num_tokens * units), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          static_cast<const Unit*>(m.from), static_cast<Unit*>(m.to), m.cu_seqlens, m.num_seqs,
          m.num_tokens, m.width, units);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

template <bool kToRect>
void launch(const Move& m) {
  if (m.num_tokens * m.token_bytes == 0) return;
  launch_in<Unit16, kToRect>(m) || launch_in<uint64_t, kToRect>(m) ||
      launch_in<uint32_t, kToRect>(m) || launch_in<uint16_t, kToRect>(m) ||
      launch_in<uint8_t, kToRect>(m);
}

int64_t longest_of(const at::Tensor& cu_seqlens) {
  const at::Tensor starts = cu_seqlens.cpu();
  const auto* start = starts.const_data_ptr<int32_t>();
  int64_t longest = 0;
  for (int64_t s = 0; s + 1 < starts.numel(); ++s) {
    longest = std::max<int64_t>(longest, start[s + 1] - start[s]);
  }
  return longest;
}

}  // namespace

at::Tensor pad(const at::Tensor& flat, const at::Tensor& cu_seqlens, const at::Scalar& value,
               std::optional<int64_t> max_len) {
  TORCH_CHECK_VALUE(flat.dim() > 0, "flat must have a dimension of tokens");
  const c10::cuda::CUDAGuard guard(flat.device());
  const int32_t* starts = ints(cu_seqlens, "cu_seqlens", 1, flat.device());
  const int64_t width = max_len ? *max_len : longest_of(cu_seqlens);
  std::vector<int64_t> shape = flat.sizes().vec();
  shape[0] = width;
  shape.insert(shape.begin(), cu_seqlens.numel() - 1);
  const at::Tensor rect = at::full(shape, value, flat.options());
  const at::Tensor source = flat.contiguous();
  if (flat.numel() == 0) return rect;
  launch<true>({source.const_data_ptr(), rect.mutable_data_ptr(), starts, int32_t(shape[0]),
                flat.size(0), width, int64_t(source.nbytes()) / flat.size(0)});
  return rect;
}

at::Tensor unpad(const at::Tensor& rect, const at::Tensor& cu_seqlens,
                 std::optional<int64_t> num_tokens) {
  TORCH_CHECK_VALUE(rect.dim() > 1 && rect.size(0) + 1 == cu_seqlens.numel(),
                    "rect must be [S, L, ...] and cu_seqlens [S + 1]");
  const c10::cuda::CUDAGuard guard(rect.device());
  const int32_t* starts = ints(cu_seqlens, "cu_seqlens", 1, rect.device());
  const int64_t tokens = num_tokens ? *num_tokens : cu_seqlens[-1].item<int32_t>();
  std::vector<int64_t> shape = rect.sizes().vec();
  shape.erase(shape.begin());
  shape[0] = tokens;
  const at::Tensor flat = at::empty(shape, rect.options());
  const at::Tensor source = rect.contiguous();
  if (flat.numel() == 0) return flat;
  launch<false>({source.const_data_ptr(), flat.mutable_data_ptr(), starts, int32_t(rect.size(0)),
                 tokens, rect.size(1), int64_t(flat.nbytes()) / tokens});
  return flat;
}

}  // namespace pyserve::cuda
