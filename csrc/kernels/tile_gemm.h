// Matrix product against one packed panel, by tiles of bfloat16. Included by isa_amx.cpp only.
#pragma once

#include "kernels/tile_unpack.h"

namespace pyserve::PYSERVE_ISA {

static_assert(kTileRowGroup == 2 * kTileHeight);

inline constexpr int kBlockNumbers = kTileColumns * kTileDepth;
// Of a panel: so much stays in the first-level cache while groups of rows pass by.
inline constexpr int kSliceBlocks = 9;
inline constexpr int kAheadBlocks = 8;

// Weights that lie as tiles already, and those that become so.
struct DenseTiles {
  static constexpr int kBlockBytes = 2 * kTileBytes;
  static constexpr bool kUnpacked = true;
  static void unpack(const std::uint8_t*, int, bf16*) {}
};

template <QuantType Type>
struct QuantTiles {
  static constexpr int kBlockBytes = QuantPanel(Type).block_bytes();
  static constexpr bool kUnpacked = false;
  // One of a block's two tiles, to its place among both.
  PYSERVE_INLINE static void unpack(const std::uint8_t* block, int side, bf16* tiles) {
    unpack_tile<Type>(block, side, tiles + side * kTileHeight * kTileDepth);
  }
};

// Tiles 0..3 are sums, [row tile][column tile]; 4 and 5 rows, 6 and 7 weights. Both column tiles of
// a block follow each other. `other(side)` is work for the vector units meanwhile.
template <bool TwoRowTiles, typename Other>
PYSERVE_INLINE void multiply_block(const bf16* a, std::ptrdiff_t row_bytes, const void* weights,
                                   const Other& other) {
  const auto* b = static_cast<const char*>(weights);
  compiler_fence();
  _tile_loadd(6, b, kTileRowBytes);
  _tile_loadd(4, a, row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  other(0);
  _tile_loadd(7, b + kTileBytes, kTileRowBytes);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (TwoRowTiles) {
    _tile_loadd(5, reinterpret_cast<const char*>(a) + kTileHeight * row_bytes, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  other(1);
}

template <bool TwoRowTiles>
PYSERVE_INLINE void load_sums(const float* c, std::ptrdiff_t row_bytes) {
  compiler_fence();
  _tile_loadd(0, c, row_bytes);
  _tile_loadd(1, c + 16, row_bytes);
  if constexpr (TwoRowTiles) {
    const auto* lower = reinterpret_cast<const char*>(c) + kTileHeight * row_bytes;
    _tile_loadd(2, lower, row_bytes);
    _tile_loadd(3, lower + kTileRowBytes, row_bytes);
  }
}

template <bool TwoRowTiles>
PYSERVE_INLINE void begin_sums(const float* bias) {
  static constexpr float kNone[kTileColumns] = {};
  load_sums<TwoRowTiles>(bias == nullptr ? kNone : bias, 0);
}

template <bool TwoRowTiles>
PYSERVE_INLINE void store_sums(float* c, std::ptrdiff_t row_bytes) {
  _tile_stored(0, c, row_bytes);
  _tile_stored(1, c + 16, row_bytes);
  if constexpr (TwoRowTiles) {
    auto* lower = reinterpret_cast<char*>(c) + kTileHeight * row_bytes;
    _tile_stored(2, lower, row_bytes);
    _tile_stored(3, lower + kTileRowBytes, row_bytes);
  }
}

inline void copy_corner(const float* sums, const TileGemmArgs& g, int row, int rows) {
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < g.columns; ++i) g.c[(row + r) * g.ldc + i] = sums[r * kTileColumns + i];
}

// A group of rows times some blocks, which are unpacked to `tiles` meanwhile: one ahead of their
// product, for tiles load slowly what has just been stored. Room for `kept` blocks is used in turn.
template <typename Weights, bool TwoRowTiles>
PYSERVE_INLINE void multiply_packed(const bf16* a, std::ptrdiff_t row_bytes,
                                    const std::uint8_t* panel, int blocks, bf16* tiles, int kept) {
  for (int side = 0; side < 2; ++side) Weights::unpack(panel, side, tiles);
  for (int block = 0; block < blocks; ++block, panel += Weights::kBlockBytes) {
    for (int i = 0; i < Weights::kBlockBytes; i += 64)
      __builtin_prefetch(panel + kAheadBlocks * Weights::kBlockBytes + i);
    const auto* weights =
        Weights::kUnpacked ? static_cast<const void*>(panel) : tiles + block % kept * kBlockNumbers;
    bf16* next = tiles + (block + 1) % kept * kBlockNumbers;
    const bool more = block + 1 < blocks;
    multiply_block<TwoRowTiles>(a + block * kTileDepth, row_bytes, weights, [&](int side) {
      if (more) Weights::unpack(panel + Weights::kBlockBytes, side, next);
    });
  }
}

// Two tiles of rows times blocks that are tiles; `share` bytes from *ahead on are asked for with
// each.
PYSERVE_INLINE void multiply_blocks(const bf16* a, std::ptrdiff_t row_bytes, const void* weights,
                                    int blocks, const std::uint8_t** ahead, std::ptrdiff_t share) {
  for (int i = 0; i < blocks; ++i) {
    for (std::ptrdiff_t line = 0; line < share; line += 64) __builtin_prefetch(*ahead + line, 0, 2);
    if (share > 0) *ahead += share;
    multiply_block<true>(a + i * kTileDepth, row_bytes,
                         static_cast<const char*>(weights) + i * 2 * kTileBytes, [](int) {});
  }
}

// One group of rows over the whole depth: the tiles have as many rows as it has.
template <typename Weights, bool TwoRowTiles>
void multiply_group(const TileGemmArgs& g, int row, float* sums, std::ptrdiff_t sum_bytes) {
  alignas(64) bf16 tiles[2 * kBlockNumbers];
  begin_sums<TwoRowTiles>(g.bias);
  multiply_packed<Weights, TwoRowTiles>(g.a + row * g.lda, g.lda * sizeof(bf16), g.panel, g.blocks,
                                        tiles, 2);
  store_sums<TwoRowTiles>(sums, sum_bytes);
}

template <typename Weights>
void multiply_few(const TileGemmArgs& g, int row, int rows) {
  TileShapes shapes = whole_tiles();
  for (int tile : {0, 1, 4})
    shapes.rows[tile] = static_cast<std::uint8_t>(rows < kTileHeight ? rows : kTileHeight);
  for (int tile : {2, 3, 5})
    shapes.rows[tile] = static_cast<std::uint8_t>(rows > kTileHeight ? rows - kTileHeight : 1);
  const TileScope scope(shapes);
  alignas(64) float corner[kTileRowGroup * kTileColumns];
  const bool whole = g.columns == kTileColumns;
  float* sums = whole ? g.c + row * g.ldc : corner;
  const std::ptrdiff_t sum_bytes = sizeof(float) * (whole ? g.ldc : kTileColumns);
  if (rows > kTileHeight)
    multiply_group<Weights, true>(g, row, sums, sum_bytes);
  else
    multiply_group<Weights, false>(g, row, sums, sum_bytes);
  if (!whole) copy_corner(corner, g, row, rows);
}

// Several groups of rows, a slice of the depth at a time. Between slices sums rest in c: float32
// stores are exact. Those of a last group that is not whole rest elsewhere, and it reads rows of a
// past the last.
template <typename Weights>
void multiply_many(const TileGemmArgs& g) {
  const TileScope scope(whole_tiles());
  alignas(64) float corner[kTileRowGroup * kTileColumns];
  alignas(64) bf16 tiles[kSliceBlocks * kBlockNumbers];
  const std::ptrdiff_t row_bytes = g.lda * sizeof(bf16);
  // Tiles that come from memory are asked for a slice before, all through the work on that.
  const int groups = (g.rows + kTileRowGroup - 1) / kTileRowGroup;
  const std::ptrdiff_t share = Weights::kBlockBytes / groups;
  const int slices = (g.blocks + kSliceBlocks - 1) / kSliceBlocks;
  for (int slice = 0; slice < slices; ++slice) {
    const int begin = g.blocks * slice / slices, blocks = g.blocks * (slice + 1) / slices - begin;
    const std::uint8_t* panel = g.panel + std::ptrdiff_t{begin} * Weights::kBlockBytes;
    const std::uint8_t* ahead = panel + blocks * std::ptrdiff_t{Weights::kBlockBytes};
    for (int row = 0; row < g.rows; row += kTileRowGroup) {
      const bool whole = g.rows - row >= kTileRowGroup;
      float* sums = whole ? g.c + row * g.ldc : corner;
      const std::ptrdiff_t sum_bytes = sizeof(float) * (whole ? g.ldc : kTileColumns);
      if (slice == 0)
        begin_sums<true>(g.bias);
      else
        load_sums<true>(sums, sum_bytes);
      // Stores that wait for their line hold up loads from addresses alike.
      for (int r = 0; r < kTileRowGroup; ++r)
        for (int i = 0; i < 2; ++i)
          __builtin_prefetch(reinterpret_cast<char*>(sums) + r * sum_bytes + i * 64, 1);
      const bf16* a = g.a + row * g.lda + begin * kTileDepth;
      if (!Weights::kUnpacked && row == 0)
        multiply_packed<Weights, true>(a, row_bytes, panel, blocks, tiles, kSliceBlocks);
      else if (Weights::kUnpacked)
        multiply_blocks(a, row_bytes, panel, blocks, &ahead, share);
      else
        multiply_blocks(a, row_bytes, tiles, blocks, nullptr, 0);
      store_sums<true>(sums, sum_bytes);
    }
  }
  if (const int left = g.rows % kTileRowGroup; left > 0)
    copy_corner(corner, g, g.rows - left, left);
}

template <typename Weights>
void tile_gemm(const TileGemmArgs& g) {
  if (g.rows > kTileRowGroup && g.columns == kTileColumns) return multiply_many<Weights>(g);
  for (int row = 0; row < g.rows; row += kTileRowGroup)
    multiply_few<Weights>(g, row, g.rows - row < kTileRowGroup ? g.rows - row : kTileRowGroup);
}

// To bfloat16, to nearest with ties to even; zeros up to a whole block.
inline void round_row(const float* x, int n, bf16* out) {
  const auto put = [&](int i, Vec first, Vec second) {
    const __m512bh halves = _mm512_cvtne2ps_pbh(second, first);
    __builtin_memcpy(out + i, &halves, sizeof halves);
  };
  int i = 0;
  for (; i + kTileDepth <= n; i += kTileDepth) put(i, load(x + i), load(x + i + kLanes));
  if (i == n) return;
  const int first = n - i < kLanes ? n - i : kLanes;
  put(i, load_first(x + i, first), load_first(x + i + first, n - i - first));
}

inline void set_tile_gemm(Kernels& kernels) {
  kernels.tile_gemm = tile_gemm<DenseTiles>;
  kernels.quant_tile_gemm[static_cast<int>(QuantType::q8_0)] =
      tile_gemm<QuantTiles<QuantType::q8_0>>;
  kernels.quant_tile_gemm[static_cast<int>(QuantType::q4_0)] =
      tile_gemm<QuantTiles<QuantType::q4_0>>;
  kernels.quant_tile_gemm[static_cast<int>(QuantType::q4_1)] =
      tile_gemm<QuantTiles<QuantType::q4_1>>;
  kernels.quant_tile_gemm[static_cast<int>(QuantType::q8_1)] =
      tile_gemm<QuantTiles<QuantType::q8_1>>;
  kernels.round_row = round_row;
}

}  // namespace pyserve::PYSERVE_ISA
