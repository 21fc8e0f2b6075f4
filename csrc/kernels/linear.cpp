#include "kernels/linear.h"

#include <algorithm>

#include "kernels/bf16.h"

namespace pyserve {

Linear::Linear(const Kernels& kernels, DType dtype, int out, int in)
    : kernels_(&kernels), dtype_(dtype), out_(out), in_(in) {
  const std::ptrdiff_t padded = round_up(out, kernels.panel_columns);
  panels_ = Buffer(padded * in * element_size(dtype));
}

template <typename T>
void Linear::pack_panel(const float* weight, int rows, int at, int panel) {
  const int columns = kernels_->panel_columns;
  T* to = panels_.as<T>() + std::ptrdiff_t{panel} * in_ * columns;
  const int begin = std::max(at, panel * columns), end = std::min(at + rows, (panel + 1) * columns);
  for (int depth = 0; depth < in_; ++depth)
    for (int row = begin; row < end; ++row)
      to[std::ptrdiff_t{depth} * columns + row - panel * columns] =
          from_float<T>(weight[std::ptrdiff_t{row - at} * in_ + depth]);
}

void Linear::pack(ThreadPool& pool, const float* weight, int rows, int at) {
  const int columns = kernels_->panel_columns;
  const int first = at / columns, last = (at + rows - 1) / columns;
  pool.run(last - first + 1, [&](int item, int) {
    if (dtype_ == DType::float32)
      pack_panel<float>(weight, rows, at, first + item);
    else
      pack_panel<bf16>(weight, rows, at, first + item);
  });
}

void Linear::set_bias(std::span<const float> bias, int at) {
  if (bias_.bytes() == 0) bias_ = Buffer(round_up(out_, kernels_->panel_columns) * sizeof(float));
  std::copy(bias.begin(), bias.end(), bias_.as<float>() + at);
}

void Linear::read_row(int i, float* to) const {
  const int columns = kernels_->panel_columns;
  const std::ptrdiff_t at = std::ptrdiff_t{i / columns} * in_ * columns + i % columns;
  for (int depth = 0; depth < in_; ++depth) {
    const std::ptrdiff_t index = at + std::ptrdiff_t{depth} * columns;
    to[depth] =
        dtype_ == DType::float32 ? panels_.as<float>()[index] : to_float(panels_.as<bf16>()[index]);
  }
}

void Linear::apply(ThreadPool& pool, const float* a, std::ptrdiff_t lda, int rows, float* c,
                   std::ptrdiff_t ldc) const {
  if (rows == 0) return;
  const int columns = kernels_->panel_columns;
  const int panels = (out_ + columns - 1) / columns;
  // Row blocks keep the rows of `a` in the second-level cache while panels pass by.
  const int block = kernels_->tile_rows * 16;
  const int blocks = (rows + block - 1) / block;
  const std::size_t panel_bytes = std::size_t(in_) * columns * element_size(dtype_);
  const auto gemm = kernels_->gemm[static_cast<int>(dtype_)];
  pool.run(panels * blocks, [&](int item, int) {
    const int panel = item % panels, row = item / panels * block;
    const int column = panel * columns;
    gemm({.a = a + row * lda,
          .lda = lda,
          .rows = std::min(block, rows - row),
          .panel = panels_.as<char>() + panel * panel_bytes,
          .depth = in_,
          .bias = bias_.bytes() == 0 ? nullptr : bias_.as<float>() + column,
          .c = c + row * ldc + column,
          .ldc = ldc,
          .columns = std::min(columns, out_ - column)});
  });
}

}  // namespace pyserve
