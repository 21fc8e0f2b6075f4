// Matrix product against one packed weight panel. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// A tile that nearly fills the registers, wide enough that loads keep up with products.
inline constexpr int kPanelVectors = kLanes == 16 ? 3 : 2;
inline constexpr int kGemmRows = kLanes == 16 ? 8 : 6;
inline constexpr int kPanelColumns = kPanelVectors * kLanes;
inline constexpr int kDepthBlock = PYSERVE_DEPTH_BLOCK;  // a panel slice this deep stays in L1
inline constexpr int kAheadBytes = 2048;

// A tile of Rows x kPanelColumns over depths [begin, end), `panel` from begin on. Between depth
// blocks partial sums rest in c: float32 stores are exact, so blocking does not change the chain of
// operations.
template <int Rows, typename T>
void gemm_tile(const GemmArgs& g, const T* panel, const float* a, float* c, std::ptrdiff_t ldc,
               int begin, int end, Ahead ahead) {
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
  const T* b[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) b[v] = panel + v * kLanes;
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
  alignas(64) float tile[kGemmRows * kPanelColumns];
  for (int row = 0; row < g.rows;) {
    const int rows = next_tile_rows<kGemmRows>(g.rows - row);
    with_rows<kGemmRows>(rows, [&]<int Rows>() {
      gemm_tile<Rows, T>(g, static_cast<const T*>(g.panel), g.a + row * g.lda, tile, kPanelColumns,
                         0, g.depth, {static_cast<const char*>(g.panel), 0});
    });
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < g.columns; ++i) g.c[(row + r) * g.ldc + i] = tile[r * kPanelColumns + i];
    row += rows;
  }
}

// All tiles of rows over depths [begin, end); the next ones' weights are asked for meanwhile.
template <typename T>
void gemm_rows(const GemmArgs& g, const T* panel, int begin, int end, const char*& next,
               std::ptrdiff_t share) {
  for (int row = 0; row < g.rows;) {
    const int rows = next_tile_rows<kGemmRows>(g.rows - row);
    with_rows<kGemmRows>(rows, [&]<int Rows>() {
      gemm_tile<Rows, T>(g, panel, g.a + row * g.lda, g.c + row * g.ldc, g.ldc, begin, end,
                         {next, share});
    });
    if (rows < g.rows) next += (end - begin) * share;
    row += rows;
  }
}

template <typename T>
void gemm(const GemmArgs& g) {
  if (g.columns < kPanelColumns) return gemm_edge<T>(g);
  constexpr std::ptrdiff_t kRowBytes = kPanelColumns * sizeof(T);
  const int tiles = (g.rows + kGemmRows - 1) / kGemmRows;
  // One tile reads the panel once: no need to cut it.
  const int step = tiles == 1 ? g.depth : kDepthBlock;
  // While weights come from memory, what is needed next is asked for in good time: by a single tile
  // a little ahead of itself, by several all through their work, the next panel.
  const char* next = static_cast<const char*>(g.panel) +
                     (tiles == 1 ? std::ptrdiff_t{kAheadBytes} : g.depth * kRowBytes);
  const std::ptrdiff_t share = kRowBytes / tiles;
  for (int begin = 0; begin < g.depth; begin += step) {
    const int end = begin + step < g.depth ? begin + step : g.depth;
    const T* panel = static_cast<const T*>(g.panel) + std::ptrdiff_t{begin} * kPanelColumns;
    if constexpr (!std::is_same_v<T, float>) {
      // Made float32 once for several tiles: the same numbers.
      if (tiles > 2) {
        alignas(64) float wide[kDepthBlock * kPanelColumns];
        for (int i = 0; i < (end - begin) * kPanelColumns; i += kLanes)
          store(wide + i, load(panel + i));
        gemm_rows(g, static_cast<const float*>(wide), begin, end, next, share);
        continue;
      }
    }
    gemm_rows(g, panel, begin, end, next, share);
  }
}

}  // namespace pyserve::PYSERVE_ISA
