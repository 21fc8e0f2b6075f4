// A linear layer of one or more weights that share their input.
#pragma once

#include <climits>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "kernels/linear.h"
#include "kernels/quant_linear.h"
#include "profile/op.h"

namespace pyserve {

// Rows quantised to 8 bits: what quantised weights are multiplied with. Grown as needed, used
// again.
class QuantizedRows {
 public:
  // Room for rows of blocks; what was there is lost.
  QuantBlock* reserve(int rows, int blocks);
  QuantBlock* begin() const { return data_.as<QuantBlock>(); }
  QuantBlock* row(int i, int blocks) const { return begin() + std::ptrdiff_t{i} * blocks; }

 private:
  Buffer data_;
};

// The rows that a projection multiplies with its weights: in float32, in 8 bits, or both, as
// takes_floats() and takes_blocks() say. Blocks are dense, in / 32 a row.
struct ProjectionInput {
  const float* floats = nullptr;
  std::ptrdiff_t stride = 0;
  const QuantBlock* blocks = nullptr;
};

// y = x W^T + b, W [out, in] made of parts, each all of one kind: dense in the compute type, or
// quantised. One loop over the panels of all parts (query, key and value; gate and
// up), whatever their kinds are.
class Projection {
 public:
  Projection() = default;
  Projection(const Kernels& kernels, DType dtype, int out, int in)
      : kernels_(&kernels), dtype_(dtype), out_(out), in_(in) {}

  int out() const { return out_; }
  int in() const { return in_; }
  std::size_t bytes() const;

  // Copies rows [at, at + rows) of W in, from a dense [rows, in].
  void pack(ThreadPool& pool, const float* weight, int rows, int at);
  // The same from bytes as a file has them, whole blocks of the format; quantised then.
  void pack(ThreadPool& pool, const StoredFormat& format, const std::uint8_t* blocks, int rows,
            int at);
  void set_bias(std::span<const float> bias, int at);
  // Row i of W, as stored: an embedding lookup that needs no second copy.
  void read_row(int i, float* to) const;

  // Whether some part is multiplied with float32, and whether one is with 8 bits.
  bool takes_floats() const;
  bool takes_blocks() const;
  int blocks() const { return in_ / kQuantDepth; }  // of a row in 8 bits
  // Rows of a in 8 bits where a part wants them so, else null.
  const QuantBlock* quantize(ThreadPool& pool, const float* a, std::ptrdiff_t lda, int rows,
                             QuantizedRows& work) const;

  // c[rows, out] = a[rows, in] W^T + b; of parts that begin outside of outputs [begin, end) nothing
  // is computed. Each element's bits depend on its row of a alone.
  void apply(ThreadPool& pool, const ProjectionInput& a, int rows, float* c, std::ptrdiff_t ldc,
             int begin = 0, int end = INT_MAX) const;
  // Of that product.
  profile::Cost cost(int rows, int begin = 0, int end = INT_MAX) const;

 private:
  struct Part {
    int at;
    std::variant<Linear, QuantLinear> weight;

    int panels() const;
  };

  Part& part_at(int at, std::variant<Linear, QuantLinear> weight);

  const Kernels* kernels_ = nullptr;
  DType dtype_ = DType::float32;
  int out_ = 0;
  int in_ = 0;
  std::vector<Part> parts_;  // ascending
  Buffer bias_;              // out, and a panel more: panels read past the end of their part
};

}  // namespace pyserve
