// Tile registers of AMX. Included by isa_amx.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// Rows and bytes of every tile register, as the instruction takes it.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

inline constexpr int kTiles = 8;
inline constexpr int kTileHeight = 16;    // rows
inline constexpr int kTileRowBytes = 64;  // 32 bfloat16, or 16 float32
inline constexpr int kTileBytes = kTileHeight * kTileRowBytes;
inline constexpr int kTileFloats = kTileBytes / 4;

// All tiles whole.
inline TileShapes whole_tiles() {
  TileShapes shapes;
  for (int tile = 0; tile < kTiles; ++tile) {
    shapes.row_bytes[tile] = kTileRowBytes;
    shapes.rows[tile] = kTileHeight;
  }
  return shapes;
}

// The compiler takes tile loads, and all but the first bytes of shapes, for no reading of memory:
// what was stored to before them must be there.
PYSERVE_INLINE void compiler_fence() { __asm__ volatile("" ::: "memory"); }

// While one lives, this thread's tiles have these shapes; they start as zeros. Afterwards they are
// released: a thread that holds tiles costs 8 KiB at each switch.
class TileScope {
 public:
  PYSERVE_INLINE explicit TileScope(const TileShapes& shapes) {
    compiler_fence();
    _tile_loadconfig(&shapes);
  }
  PYSERVE_INLINE ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace pyserve::PYSERVE_ISA
