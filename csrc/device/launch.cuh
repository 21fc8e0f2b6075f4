// Runs kernel bodies on CUDA: a warp or a block for each row, a thread for each index.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>

#include "device/host_device.h"

namespace pyserve {

constexpr int kWarp = 32;
constexpr int kBlock = 256;

namespace detail {

struct Plus {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Greater {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

template <typename T, typename F>
__device__ T combine_warp(T value, F f) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = f(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  }
  return value;
}

}  // namespace detail

struct WarpLanes {
  int index;
  static constexpr int count = kWarp;

  template <typename T>
  __device__ T sum(T value) const {
    return detail::combine_warp(value, detail::Plus{});
  }
  template <typename T>
  __device__ T max(T value) const {
    return detail::combine_warp(value, detail::Greater{});
  }
  __device__ void sync() const { __syncwarp(); }
};

// `scratch` is shared memory, 8 bytes for each warp.
struct BlockLanes {
  int index, count;
  uint64_t* scratch;

  template <typename T>
  __device__ T sum(T value) const {
    return combine(value, detail::Plus{});
  }
  template <typename T>
  __device__ T max(T value) const {
    return combine(value, detail::Greater{});
  }
  __device__ void sync() const { __syncthreads(); }

 private:
  template <typename T, typename F>
  __device__ T combine(T value, F f) const {
    auto* partial = reinterpret_cast<T*>(scratch);
    value = detail::combine_warp(value, f);
    __syncthreads();  // the last result has been read
    if (index % kWarp == 0) partial[index / kWarp] = value;
    __syncthreads();
    value = partial[0];
    for (int warp = 1; warp < count / kWarp; ++warp) value = f(value, partial[warp]);
    return value;
  }
};

// The bounds keep registers few enough for a block to start at all.
template <typename Body>
__global__ void __launch_bounds__(kBlock) run_warps(Body body, int64_t rows) {
  const int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (row < rows) body(WarpLanes{int(threadIdx.x % kWarp)}, row);
}

template <typename Body>
__global__ void __launch_bounds__(Body::kLanes) run_blocks(Body body) {
  __shared__ uint64_t scratch[kWarp];
  body(BlockLanes{int(threadIdx.x), int(blockDim.x), scratch}, int64_t(blockIdx.x));
}

template <typename Body>
__global__ void __launch_bounds__(kBlock) run_each(Body body, int64_t count) {
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index < count) body(index);
}

struct OnCuda {
  static constexpr bool kIsCuda = true;

  // On the current stream.
  template <typename Body>
  static void rows(const at::Device& device, int64_t count, const Body& body) {
    static_assert(Body::kLanes % kWarp == 0 && Body::kLanes <= 1024);
    if (count == 0) return;
    const c10::cuda::CUDAGuard guard(device);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    if constexpr (Body::kLanes == kWarp) {
      const auto blocks = unsigned((count * kWarp + kBlock - 1) / kBlock);
      run_warps<<<blocks, kBlock, 0, stream>>>(body, count);
    } else {
      run_blocks<<<unsigned(count), Body::kLanes, 0, stream>>>(body);
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename Body>
  static void each(const at::Device& device, int64_t count, const Body& body) {
    if (count == 0) return;
    const c10::cuda::CUDAGuard guard(device);
    const auto blocks = unsigned((count + kBlock - 1) / kBlock);
    run_each<<<blocks, kBlock, 0, c10::cuda::getCurrentCUDAStream()>>>(body, count);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace pyserve
