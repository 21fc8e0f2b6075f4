// The kernels for x86-64 processors with AMX in bfloat16: those of AVX-512, but for products.
#if defined(__x86_64__)
// Standard headers come before the target is widened: their inline functions must stay portable,
// for the linker keeps one copy of each for the whole extension.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/bf16.h"
#include "kernels/kernels.h"

#define PYSERVE_ISA amx
#define PYSERVE_LANES 16
#define PYSERVE_TILE_ROWS 12

#if defined(__clang__)
#pragma clang attribute push(                                                              \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2," \
                          "fma,f16c,amx-tile,amx-bf16"))),                                 \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")
#endif

#include "kernels/simd.h"
// simd.h first: the others build on it.
#include "kernels/attention_amx.h"
#include "kernels/peak_tile.h"
#include "kernels/tile_gemm.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pyserve {

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels table = avx512_kernels();
    table.name = "amx";
    amx::set_tile_attention(table);
    table.tile_rows = kTileRowGroup;
    amx::set_tile_gemm(table);
    table.peak_tile = amx::peak_tile;
    return table;
  }();
  return kernels;
}

}  // namespace pyserve
#endif
