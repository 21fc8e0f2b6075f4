// A linear layer's weight in the order of tile registers, in bfloat16 or quantised.
#pragma once

#include <cstdint>

#include "kernels/bf16.h"
#include "kernels/buffer.h"
#include "kernels/kernels.h"
#include "kernels/stored_format.h"
#include "kernels/thread_pool.h"

namespace pyserve {

// y = x W^T + b for W [out, in], kept as panels of 32 outputs, each blocks of two tiles, 32 deep
// and 16 wide. x is rounded to bfloat16, and so is each quantised weight when it becomes a number;
// sums are float32, in the order of the instruction.
class TileLinear {
 public:
  // In bfloat16; and quantised, in being whole blocks of the format.
  TileLinear(const Kernels& kernels, int out, int in);
  TileLinear(const Kernels& kernels, const StoredFormat& format, int out, int in);

  int out() const { return out_; }
  int in() const { return in_; }
  int blocks() const { return (in_ + kTileDepth - 1) / kTileDepth; }
  std::size_t bytes() const { return panels_.bytes(); }
  std::byte* move_to(std::byte* place) { return panels_.move_to(place); }

  // Copies W in, from a dense [out, in] or from a file's blocks.
  void pack(ThreadPool& pool, const float* weight);
  void pack(ThreadPool& pool, const std::uint8_t* stored);
  // Row i of W, as stored.
  void read_row(int i, float* to) const;

  int panels() const { return (out_ + kTileColumns - 1) / kTileColumns; }
  // c[rows, out] = a W^T + bias, but only the columns of one panel. Rows of a end in zeros up to a
  // whole block, and there are whole kTileRowGroups of them, of which those past the last count for
  // nothing. bias may be null, or holds round_up(out, kTileColumns) numbers. Each element's bits
  // depend on its row of a alone.
  void apply_panel(int panel, const bf16* a, std::ptrdiff_t lda, int rows, const float* bias,
                   float* c, std::ptrdiff_t ldc) const;

 private:
  void read_block(const std::uint8_t* block, int column, float* to) const;
  void pack_block(const StoredBlock& block, std::uint8_t* panel_block, int column) const;
  std::uint8_t* block_at(int panel, int block) const {
    return panels_.as<std::uint8_t>() +
           (std::ptrdiff_t{panel} * blocks() + block) * std::ptrdiff_t{block_bytes_};
  }

  const Kernels* kernels_;
  const StoredFormat* format_;  // null: bfloat16
  int out_;
  int in_;
  int block_bytes_;  // two tiles
  Buffer panels_;
};

}  // namespace pyserve
