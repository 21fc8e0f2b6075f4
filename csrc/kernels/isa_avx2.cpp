// The kernels for x86-64 processors with AVX2, FMA and F16C.
#if defined(__x86_64__)
// Standard headers come before the target is widened: their inline functions must stay portable,
// for the linker keeps one copy of each for the whole extension.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/bf16.h"
#include "kernels/kernels.h"

#define PYSERVE_ISA avx2
#define PYSERVE_LANES 8
#define PYSERVE_TILE_ROWS 6
#define PYSERVE_DEPTH_BLOCK 256

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "kernels/isa_table.h"
#include "kernels/peak_int.h"
#include "kernels/quant_gemm.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pyserve {

const Kernels& avx2_kernels() {
  static const Kernels kernels = [] {
    Kernels table = avx2::table("avx2");
    avx2::set_quant_gemm(table);
    table.peak_int = avx2::peak_int;
    return table;
  }();
  return kernels;
}

}  // namespace pyserve
#endif
