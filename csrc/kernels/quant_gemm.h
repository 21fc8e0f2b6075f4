// Matrix product of 8-bit activations with one quantised weight panel. Included by isa_*.cpp only.
#pragma once

#include "kernels/quant_dot.h"

namespace pyserve::PYSERVE_ISA {

inline constexpr int kQuantTileRows = 6;  // with two vectors each, all that the registers hold
inline constexpr int kQuantAheadBytes = 2048;

// A tile of Rows x kQuantTileColumns, from that column of the panel on. Every lane of acc is its
// own chain over the blocks: bits do not depend on the tile's rows. What is `ahead` is brought near
// block by block.
template <QuantType Type, int Rows>
void quant_tile(const QuantGemmArgs& g, const QuantBlock* a, float* c, std::ptrdiff_t ldc,
                int column, Ahead ahead) {
  constexpr QuantPanel kPanel(Type);
  const std::uint8_t* scales = g.panel + 2 * column;
  const std::uint8_t* integers = g.panel + kPanel.scale_bytes + 4 * column;
  Vec acc[Rows][kQuantVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v)
      acc[r][v] = g.bias == nullptr ? Vec{} : load(g.bias + column + v * kLanes);
  for (int b = 0; b < g.blocks; ++b, ++a) {
    for (std::ptrdiff_t i = 0; i < ahead.step; i += 64) __builtin_prefetch(ahead.from + i);
    ahead.from += ahead.step;
    Vec dots[Rows][kQuantVectors];
    quant_dots<Type, Rows>(integers, a, g.lda, dots);
    Vec d[kQuantVectors], m[kQuantVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v) {
      d[v] = load_half(scales + 2 * v * kLanes);
      if constexpr (quant_has_minimum(Type))
        m[v] = load_half(scales + 2 * (kQuantColumns + v * kLanes));
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec scale = splat(a[r * g.lda].scale), sum = splat(a[r * g.lda].weighted_sum);
#pragma GCC unroll 4
      for (int v = 0; v < kQuantVectors; ++v) {
        acc[r][v] = fma(dots[r][v], d[v] * scale, acc[r][v]);
        if constexpr (quant_has_minimum(Type)) acc[r][v] = fma(m[v], sum, acc[r][v]);
      }
    }
    scales += kPanel.block_bytes();
    integers += kPanel.block_bytes();
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

// What the tile-th of several tiles asks for. While weights come from memory, a single tile asks a
// little ahead of itself; several share out the next panel, so that it is there when they end.
template <QuantType Type>
Ahead quant_ahead(const QuantGemmArgs& g, int tile, int tiles) {
  constexpr QuantPanel kPanel(Type);
  const char* panel = reinterpret_cast<const char*>(g.panel);
  if (tiles == 1) return {panel + kQuantAheadBytes, kPanel.block_bytes()};
  const std::ptrdiff_t bytes = kPanel.bytes(g.blocks);
  const std::ptrdiff_t step = round_up((kPanel.block_bytes() + tiles - 1) / tiles, 64);
  const std::ptrdiff_t begin = tile * step * g.blocks;
  return begin < bytes ? Ahead{panel + bytes + begin, step} : Ahead{};
}

template <QuantType Type>
void quant_gemm(const QuantGemmArgs& g) {
  alignas(64) float edge[kQuantTileRows * kQuantColumns];
  const bool whole = g.columns == kQuantColumns;
  const int tiles = (g.rows + kQuantTileRows - 1) / kQuantTileRows;
  for (int row = 0, tile = 0; row < g.rows; ++tile) {
    const int rows = next_tile_rows<kQuantTileRows>(g.rows - row);
    const Ahead ahead = quant_ahead<Type>(g, tile, tiles);
    float* c = whole ? g.c + row * g.ldc : edge;
    const std::ptrdiff_t ldc = whole ? g.ldc : kQuantColumns;
    with_rows<kQuantTileRows>(rows, [&]<int Rows>() {
      for (int column = 0; column < kQuantColumns; column += kQuantTileColumns)
        quant_tile<Type, Rows>(g, g.a + row * g.lda, c + column, ldc, column,
                               column == 0 ? ahead : Ahead{});
    });
    if (!whole)
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < g.columns; ++i)
          g.c[(row + r) * g.ldc + i] = edge[r * kQuantColumns + i];
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
