// The fastest that tiles of bfloat16 are multiplied, for measuring what a kernel could reach.
// Included by isa_amx.cpp only, after amx_tile.h.
#pragma once

namespace pyserve::PYSERVE_ISA {

// Four sums, as the products have: more than the unit's latency asks for.
inline double peak_tile(std::int64_t turns) {
  const TileScope scope(whole_tiles());
  for (std::int64_t i = 0; i < turns; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  constexpr int kProducts = kTileFloats * (kTileRowBytes / 2);
  return double(turns) * 4 * kProducts * 2;
}

}  // namespace pyserve::PYSERVE_ISA
