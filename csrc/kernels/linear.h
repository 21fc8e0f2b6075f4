// A linear layer's weight, packed once for the kernels of one instruction set.
#pragma once

#include "kernels/buffer.h"
#include "kernels/kernels.h"
#include "kernels/thread_pool.h"

namespace pyserve {

// y = x W^T + b for W [out, in], stored as panels [out / columns][in][columns]: a panel streams
// through the registers row by row.
class Linear {
 public:
  Linear() = default;
  Linear(const Kernels& kernels, DType dtype, int out, int in);

  int out() const { return out_; }
  int in() const { return in_; }
  std::size_t bytes() const { return panels_.bytes(); }
  std::byte* move_to(std::byte* place) { return panels_.move_to(place); }

  // Copies W in from a dense [out, in].
  void pack(ThreadPool& pool, const float* weight);
  // Row i of W, as stored: an embedding lookup that needs no second copy.
  void read_row(int i, float* to) const;

  int panels() const { return (out_ + kernels_->panel_columns - 1) / kernels_->panel_columns; }
  // c[rows, out] = a[rows, in] W^T + bias, but only the columns of one panel. bias may be null, or
  // holds round_up(out, panel_columns) numbers. Each element's bits depend on its row of a alone.
  void apply_panel(int panel, const float* a, std::ptrdiff_t lda, int rows, const float* bias,
                   float* c, std::ptrdiff_t ldc) const;

 private:
  template <typename T>
  void pack_panel(const float* weight, int panel);

  const Kernels* kernels_ = nullptr;
  DType dtype_ = DType::float32;
  int out_ = 0;
  int in_ = 0;
  Buffer panels_;
};

}  // namespace pyserve
