// Products with quantised weights and keys for x86-64 processors with AVX-512 and VNNI.
#if defined(__x86_64__)
// Standard headers come before the target is widened: their inline functions must stay portable,
// for the linker keeps one copy of each for the whole extension.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/bf16.h"
#include "kernels/kernels.h"

#define PYSERVE_ISA avx512_vnni
#define PYSERVE_LANES 16
#define PYSERVE_TILE_ROWS 12
#define PYSERVE_VNNI

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#endif

#include "kernels/simd.h"
// simd.h first: the others build on it.
#include "kernels/attention.h"
#include "kernels/peak.h"
#include "kernels/peak_int.h"
#include "kernels/quant_gemm.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pyserve {

void set_vnni(Kernels& kernels) {
  avx512_vnni::set_quant_gemm(kernels);
  avx512_vnni::set_int8_attention(kernels);
  kernels.peak_int = avx512_vnni::peak_int;
}

}  // namespace pyserve
#endif
