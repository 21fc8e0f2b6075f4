// The kernels for x86-64 processors with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
// Standard headers come before the target is widened: their inline functions must stay portable,
// for the linker keeps one copy of each for the whole extension.
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/bf16.h"
#include "kernels/kernels.h"

#define PYSERVE_ISA avx512
#define PYSERVE_LANES 16
#define PYSERVE_TILE_ROWS 12
#define PYSERVE_DEPTH_BLOCK 192

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "kernels/isa_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pyserve {

const Kernels& avx512_kernels() {
  static const Kernels kernels = [] {
    Kernels table = avx512::table("avx512");
    // Without VNNI, byte products are as fast in AVX2, and have the same bits.
    if (__builtin_cpu_supports("avx512vnni")) {
      set_vnni(table);
    } else {
      std::copy_n(avx2_kernels().quant_gemm, std::size(table.quant_gemm), table.quant_gemm);
      table.peak_int = avx2_kernels().peak_int;
    }
    return table;
  }();
  return kernels;
}

}  // namespace pyserve
#endif
