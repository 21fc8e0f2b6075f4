// Matrix product of 8-bit activations with one quantised weight panel. Included by isa_*.cpp only.
#pragma once

#include "kernels/quant_dot.h"

namespace pyserve::PYSERVE_ISA {

inline constexpr int kQuantAheadBytes = 2048;

// Every lane of acc is its own chain over the blocks: bits do not depend on the tile's rows.
template <QuantType Type, int Rows>
void quant_tile(const QuantGemmArgs& g, const QuantBlock* a, float* c, std::ptrdiff_t ldc,
                const std::uint8_t* ahead) {
  constexpr QuantPanel kPanel(Type);
  const std::uint8_t* scales = g.panel;
  const std::uint8_t* integers = g.panel + kPanel.integers(g.blocks);
  Vec acc[Rows][kQuantVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v)
      acc[r][v] = g.bias == nullptr ? Vec{} : load(g.bias + v * kLanes);
  for (int b = 0; b < g.blocks; ++b, ++a) {
    if (ahead != nullptr)
      for (int i = 0; i < kPanel.integer_bytes; i += 64)
        __builtin_prefetch(ahead + b * kPanel.integer_bytes + i);
    Vec dots[Rows][kQuantVectors];
    quant_dots<Type, Rows>(integers, a, g.lda, dots);
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v) {
      const Vec d = load_half(scales + 2 * v * kLanes);
      Vec m = {};
      if constexpr (quant_has_minimum(Type))
        m = load_half(scales + 2 * (kQuantColumns + v * kLanes));
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        acc[r][v] = fma(dots[r][v], d * splat(a[r * g.lda].scale), acc[r][v]);
        if constexpr (quant_has_minimum(Type))
          acc[r][v] = fma(m, splat(a[r * g.lda].weighted_sum), acc[r][v]);
      }
    }
    scales += kPanel.scale_bytes;
    integers += kPanel.integer_bytes;
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

template <QuantType Type>
void quant_gemm(const QuantGemmArgs& g) {
  alignas(64) float edge[kTileRows * kQuantColumns];
  const bool whole = g.columns == kQuantColumns;
  constexpr QuantPanel kPanel(Type);
  for (int row = 0; row < g.rows;) {
    const int rows = next_tile_rows(g.rows - row);
    // The only tile asks for its own weights in good time, the last of several for the next panel.
    const std::uint8_t* ahead = nullptr;
    if (row == 0 && rows == g.rows)
      ahead = g.panel + kPanel.integers(g.blocks) + kQuantAheadBytes;
    else if (row + rows == g.rows)
      ahead = g.panel + kPanel.bytes(g.blocks);
    float* c = g.c + row * g.ldc;
    with_rows(rows, [&]<int Rows>() {
      quant_tile<Type, Rows>(g, g.a + row * g.lda, whole ? c : edge, whole ? g.ldc : kQuantColumns,
                             ahead);
    });
    if (!whole)
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < g.columns; ++i) c[r * g.ldc + i] = edge[r * kQuantColumns + i];
    row += rows;
  }
}

inline void set_quant_gemm(Kernels& kernels) {
  kernels.quant_gemm[static_cast<int>(QuantType::q8_0)] = quant_gemm<QuantType::q8_0>;
  kernels.quant_gemm[static_cast<int>(QuantType::q4_0)] = quant_gemm<QuantType::q4_0>;
  kernels.quant_gemm[static_cast<int>(QuantType::q4_1)] = quant_gemm<QuantType::q4_1>;
  kernels.quant_gemm[static_cast<int>(QuantType::q8_1)] = quant_gemm<QuantType::q8_1>;
}

}  // namespace pyserve::PYSERVE_ISA
