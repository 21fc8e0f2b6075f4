// Matrix product against one packed weight panel. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

inline constexpr int kPanelVectors = 2;
inline constexpr int kPanelColumns = kPanelVectors * kLanes;
inline constexpr int kDepthBlock = 256;  // panel slice of 256 x 32 floats stays in L1

// How many of vector v's lanes lie inside n columns.
PYSERVE_INLINE int lanes_left(int n, int v) {
  const int left = n - v * kLanes;
  return left < 0 ? 0 : (left > kLanes ? kLanes : left);
}

// A tile of Rows x kPanelColumns over [depth_begin, depth_end). Partial sums rest in c between
// depth blocks: float32 stores are exact, so blocking does not change the chain of operations.
template <int Rows, typename T>
void gemm_tile(const GemmArgs& g, const float* a, float* c, int begin, int end) {
  Vec acc[Rows][kPanelVectors];
  const bool first = begin == 0, whole = g.columns == kPanelColumns;
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      const float* from = c + r * g.ldc + v * kLanes;
      if (first)
        acc[r][v] = g.bias == nullptr ? Vec{} : load(g.bias + v * kLanes);
      else
        acc[r][v] = whole ? load(from) : load_first(from, lanes_left(g.columns, v));
    }
  const T* panel = static_cast<const T*>(g.panel) + std::ptrdiff_t{begin} * kPanelColumns;
  const T* const b[kPanelVectors] = {panel, panel + kLanes};
  accumulate<Rows, kPanelVectors, T>(acc, a + begin, g.lda, b, kPanelColumns, end - begin);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      float* to = c + r * g.ldc + v * kLanes;
      if (whole)
        store(to, acc[r][v]);
      else
        store_first(to, acc[r][v], lanes_left(g.columns, v));
    }
}

template <typename T>
void gemm(const GemmArgs& g) {
  // One tile reads the panel once: no need to cut it.
  const int step = g.rows <= kTileRows ? g.depth : kDepthBlock;
  for (int begin = 0; begin < g.depth; begin += step) {
    const int end = begin + step < g.depth ? begin + step : g.depth;
    for (int row = 0; row < g.rows;) {
      const int rows = next_tile_rows(g.rows - row);
      const float* a = g.a + row * g.lda;
      float* c = g.c + row * g.ldc;
      with_rows(rows, [&]<int Rows>() { gemm_tile<Rows, T>(g, a, c, begin, end); });
      row += rows;
    }
  }
}

}  // namespace pyserve::PYSERVE_ISA
