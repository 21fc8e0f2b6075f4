// A linear layer of one or more weights that share their input.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "kernels/linear.h"
#include "kernels/quant_linear.h"
#include "kernels/tile_linear.h"
#include "profile/op.h"

namespace pyserve {

// Rows of activations in fewer bits than float32, as weights of some kinds are multiplied with:
// blocks of 8 bits, or bfloat16. Grown as needed, used again.
class NarrowRows {
 public:
  // Room for so many rows of so many elements, in every kind; what was there is lost.
  void reserve(int rows, int elements);

  QuantBlock* blocks(int row, int elements) const {
    return blocks_.as<QuantBlock>() + std::ptrdiff_t{row} * (elements / kQuantDepth);
  }
  bf16* halves(int row, int elements) const {
    return halves_.as<bf16>() + row * half_stride(elements);
  }
  // An odd number of cache lines: rows of a tile do not fall into one cache set.
  static std::ptrdiff_t half_stride(int elements) {
    return (round_up(elements, kTileDepth) / kTileDepth | 1) * kTileDepth;
  }

 private:
  Buffer blocks_;
  Buffer halves_;
};

// The rows that a projection multiplies with its weights: in float32, narrow, or both, as
// takes_floats() and prepare_row() have it.
struct ProjectionInput {
  const float* floats = nullptr;
  std::ptrdiff_t stride = 0;
  const NarrowRows* narrow = nullptr;
};

// y = x W^T + b, W [out, in] made of parts, each all of one kind: dense in the compute type,
// quantised, or either of them as tiles where the instruction set has tiles. One loop over the
// panels of all parts (query, key and value; gate and up), whatever their kinds are.
class Projection {
 public:
  Projection() = default;
  Projection(const Kernels& kernels, DType dtype, int out, int in)
      : kernels_(&kernels), dtype_(dtype), out_(out), in_(in) {}

  int out() const { return out_; }
  int in() const { return in_; }
  std::size_t bytes() const;
  // Moves the parts to memory that lasts longer, one behind the other; returns what is behind them.
  std::byte* move_to(std::byte* place);
  int parts() const { return static_cast<int>(parts_.size()); }

  // Copies rows [at, at + rows) of W in, from a dense [rows, in].
  void pack(ThreadPool& pool, const float* weight, int rows, int at);
  // The same from bytes as a file has them, whole blocks of the format; quantised then.
  void pack(ThreadPool& pool, const StoredFormat& format, const std::uint8_t* blocks, int rows,
            int at);
  void set_bias(std::span<const float> bias, int at);
  // Row i of W, as stored: an embedding lookup that needs no second copy.
  void read_row(int i, float* to) const;

  // Whether some part is multiplied with float32.
  bool takes_floats() const { return takes<Linear>(); }
  // Row i of the input in the kinds of few bits that parts want, if any.
  void prepare_row(const float* a, int i, const NarrowRows& to) const;
  void prepare(ThreadPool& pool, const float* a, std::ptrdiff_t lda, int rows,
               const NarrowRows& to) const;

  // c[rows, out] = a[rows, in] W^T + b; of parts that begin outside of outputs [begin, end) nothing
  // is computed. Each element's bits depend on its row of a alone.
  void apply(ThreadPool& pool, const ProjectionInput& a, int rows, float* c, std::ptrdiff_t ldc,
             int begin = 0, int end = INT_MAX) const;
  // Of that product.
  profile::Cost cost(int rows, int begin = 0, int end = INT_MAX) const;

 private:
  using Weight = std::variant<Linear, QuantLinear, TileLinear>;

  struct Part {
    int at;
    Weight weight;

    int panels() const;
  };

  Part& part_at(int at, Weight weight);
  template <typename Kind>
  bool takes() const {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](const Part& part) { return std::holds_alternative<Kind>(part.weight); });
  }
  int row_block(int rows, int threads) const;
  void apply_panel(const Part& part, int panel, const ProjectionInput& a, int row, int rows,
                   float* c, std::ptrdiff_t ldc) const;

  const Kernels* kernels_ = nullptr;
  DType dtype_ = DType::float32;
  int out_ = 0;
  int in_ = 0;
  std::vector<Part> parts_;  // ascending
  Buffer bias_;              // out, and a panel more: panels read past the end of their part
};

}  // namespace pyserve
