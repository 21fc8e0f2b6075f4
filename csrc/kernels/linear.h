// A linear layer's weight, packed once for the kernels of one instruction set.
#pragma once

#include <span>

#include "kernels/buffer.h"
#include "kernels/kernels.h"
#include "kernels/thread_pool.h"

namespace pyserve {

// y = x W^T + b for W [out, in], stored as panels [out / columns][in][columns]: a panel streams
// through the registers row by row. Several weights that share their input are packed one after the
// other (fused).
class Linear {
 public:
  Linear() = default;
  Linear(const Kernels& kernels, DType dtype, int out, int in);

  int out() const { return out_; }
  int in() const { return in_; }
  std::size_t bytes() const { return panels_.bytes() + bias_.bytes(); }

  // Copies rows [at, at + rows) of W from a dense [rows, in].
  void pack(ThreadPool& pool, const float* weight, int rows, int at);
  void set_bias(std::span<const float> bias, int at);
  // Row i of W, as stored: an embedding lookup that needs no second copy.
  void read_row(int i, float* to) const;

  // c[rows, out] = a[rows, in] W^T + b. Each element's bits depend on its row of a alone.
  void apply(ThreadPool& pool, const float* a, std::ptrdiff_t lda, int rows, float* c,
             std::ptrdiff_t ldc) const;

 private:
  template <typename T>
  void pack_panel(const float* weight, int rows, int at, int panel);

  const Kernels* kernels_ = nullptr;
  DType dtype_ = DType::float32;
  int out_ = 0;
  int in_ = 0;
  Buffer panels_;
  Buffer bias_;
};

}  // namespace pyserve
