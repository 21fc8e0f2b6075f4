// A linear layer's weight that stays quantised, packed once for the kernels.
#pragma once

#include <cstdint>

#include "kernels/buffer.h"
#include "kernels/kernels.h"
#include "kernels/stored_format.h"
#include "kernels/thread_pool.h"

namespace pyserve {

// y = x W^T + b for W [out, in] in blocks of 32 along K, kept as QuantPanels of 32 outputs. x is
// quantised to 8 bits per row and block; the product is exact within a block.
class QuantLinear {
 public:
  QuantLinear(const Kernels& kernels, const StoredFormat& format, int out, int in);

  int out() const { return out_; }
  int in() const { return in_; }
  int blocks() const { return in_ / kQuantDepth; }
  std::size_t bytes() const { return panels_.bytes(); }
  std::byte* move_to(std::byte* place) { return panels_.move_to(place); }

  // Copies W in from bytes as a file has them: whole blocks of the format, row after row.
  void pack(ThreadPool& pool, const std::uint8_t* stored);
  // Row i of W, as the product takes it.
  void read_row(int i, float* to) const;

  int panels() const { return (out_ + kQuantColumns - 1) / kQuantColumns; }
  // c[rows, out] = a W^T + bias, but only the columns of one panel; lda in blocks. bias may be
  // null, or holds round_up(out, kQuantColumns) numbers. Each element's bits depend on its row of a
  // alone.
  void apply_panel(int panel, const QuantBlock* a, std::ptrdiff_t lda, int rows, const float* bias,
                   float* c, std::ptrdiff_t ldc) const;

 private:
  void pack_row(const std::uint8_t* stored, std::uint8_t* panel, int column) const;
  void pack_block(const StoredBlock& block, int index, std::uint8_t* panel, int column) const;
  std::uint8_t* panel_at(int panel) const {
    return panels_.as<std::uint8_t>() + panel * layout_.bytes(blocks());
  }

  const Kernels* kernels_;
  const StoredFormat* format_;
  QuantType type_;
  QuantPanel layout_;
  int out_;
  int in_;
  Buffer panels_;
};

}  // namespace pyserve
