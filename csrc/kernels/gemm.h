// Matrix product against one packed weight panel. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

inline constexpr int kPanelVectors = 2;
inline constexpr int kPanelColumns = kPanelVectors * kLanes;
inline constexpr int kDepthBlock = PYSERVE_DEPTH_BLOCK;  // a panel slice this deep stays in L1
inline constexpr int kAheadBytes = 2048;

// A tile of Rows x kPanelColumns over depths [begin, end). Between depth blocks partial sums rest
// in c: float32 stores are exact, so blocking does not change the chain of operations.
template <int Rows, typename T>
void gemm_tile(const GemmArgs& g, const float* a, float* c, std::ptrdiff_t ldc, int begin, int end,
               Ahead ahead) {
  Vec acc[Rows][kPanelVectors];
  if (begin == 0) {
    Vec bias[kPanelVectors] = {};
    if (g.bias != nullptr)
      for (int v = 0; v < kPanelVectors; ++v) bias[v] = load(g.bias + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = bias[v];
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = load(c + r * ldc + v * kLanes);
  }
  const T* panel = static_cast<const T*>(g.panel) + std::ptrdiff_t{begin} * kPanelColumns;
  const T* const b[kPanelVectors] = {panel, panel + kLanes};
  accumulate<Rows, kPanelVectors, T, true>(acc, a + begin, g.lda, b, kPanelColumns, end - begin,
                                           ahead);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

// The last panel of a matrix whose width is no multiple of the panel's: through a tile of its own.
template <typename T>
void gemm_edge(const GemmArgs& g) {
  alignas(64) float tile[kTileRows * kPanelColumns];
  for (int row = 0; row < g.rows;) {
    const int rows = next_tile_rows(g.rows - row);
    with_rows(rows, [&]<int Rows>() {
      gemm_tile<Rows, T>(g, g.a + row * g.lda, tile, kPanelColumns, 0, g.depth,
                         {static_cast<const char*>(g.panel), 0});
    });
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < g.columns; ++i) g.c[(row + r) * g.ldc + i] = tile[r * kPanelColumns + i];
    row += rows;
  }
}

template <typename T>
void gemm(const GemmArgs& g) {
  if (g.columns < kPanelColumns) return gemm_edge<T>(g);
  constexpr std::ptrdiff_t kRowBytes = kPanelColumns * sizeof(T);
  const int tiles = (g.rows + kTileRows - 1) / kTileRows;
  // One tile reads the panel once: no need to cut it.
  const int step = tiles == 1 ? g.depth : kDepthBlock;
  // While weights come from memory, what is needed next is asked for in good time: by a single tile
  // a little ahead of itself, by several all through their work, the next panel.
  const char* next = static_cast<const char*>(g.panel) +
                     (tiles == 1 ? std::ptrdiff_t{kAheadBytes} : g.depth * kRowBytes);
  const std::ptrdiff_t share = kRowBytes / tiles;
  for (int begin = 0; begin < g.depth; begin += step) {
    const int end = begin + step < g.depth ? begin + step : g.depth;
    for (int row = 0; row < g.rows;) {
      const int rows = next_tile_rows(g.rows - row);
      with_rows(rows, [&]<int Rows>() {
        gemm_tile<Rows, T>(g, g.a + row * g.lda, g.c + row * g.ldc, g.ldc, begin, end,
                           {next, share});
      });
      next += tiles == 1 ? 0 : (end - begin) * share;
      row += rows;
    }
  }
}

}  // namespace pyserve::PYSERVE_ISA
