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
void Linear::pack_panel(const float* weight, int panel) {
  const int columns = kernels_->panel_columns;
  T* to = panels_.as<T>() + std::ptrdiff_t{panel} * in_ * columns;
  const int begin = panel * columns, end = std::min(out_, begin + columns);
  for (int depth = 0; depth < in_; ++depth)
    for (int row = begin; row < end; ++row)
      to[std::ptrdiff_t{depth} * columns + row - begin] =
          from_float<T>(weight[std::ptrdiff_t{row} * in_ + depth]);
}

void Linear::pack(ThreadPool& pool, const float* weight) {
  pool.run(panels(), [&](int panel, int) {
    if (dtype_ == DType::float32)
      pack_panel<float>(weight, panel);
    else
      pack_panel<bf16>(weight, panel);
  });
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

void Linear::apply_panel(int panel, const float* a, std::ptrdiff_t lda, int rows, const float* bias,
                         float* c, std::ptrdiff_t ldc) const {
  const int columns = kernels_->panel_columns, column = panel * columns;
  const std::size_t panel_bytes = std::size_t(in_) * columns * element_size(dtype_);
  kernels_->gemm[static_cast<int>(dtype_)]({.a = a,
                                            .lda = lda,
                                            .rows = rows,
                                            .panel = panels_.as<char>() + panel * panel_bytes,
                                            .depth = in_,
                                            .bias = bias == nullptr ? nullptr : bias + column,
                                            .c = c + column,
                                            .ldc = ldc,
                                            .columns = std::min(columns, out_ - column)});
}

}  // namespace pyserve
