#include "profile/rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "profile/best.h"

namespace pyserve::profile {

namespace {

constexpr int kHeadDim = 64;

// What the rows are, in one place, so that a pass is a loop over them.
struct Rows {
  Rows(int rows, int width)
      : width(width),
        values(std::size_t(rows) * 2 * width),
        out(std::size_t(rows) * width),
        weight(width, 1.0f),
        blocks(std::size_t(rows) * width / kQuantDepth) {
    // Values that the ops which write in place leave about as they are: pass after pass of what
    // shrinks them would soon time denormal numbers.
    for (int row = 0; row < rows; ++row) {
      std::fill_n(at(row), width, 20.0f);
      std::fill_n(at(row) + width, width, 1.0f);
    }
  }
  float* at(int row) { return values.data() + std::ptrdiff_t{row} * 2 * width; }
  float* to(int row) { return out.data() + std::ptrdiff_t{row} * width; }
  QuantBlock* blocks_at(int row) {
    return blocks.data() + std::ptrdiff_t{row} * width / kQuantDepth;
  }

  int width;
  std::vector<float> values;
  std::vector<float> out;
  std::vector<float> weight;
  std::vector<QuantBlock> blocks;
};

std::function<void(int row)> body_of(const Kernels& k, std::string_view op, Rows& r) {
  const int n = r.width;
  const float* weight = r.weight.data();
  if (op == "rms_norm")
    return [&r, &k, weight, n](int i) { k.rms_norm(r.at(i), weight, 1e-5f, n, r.to(i)); };
  if (op == "layer_norm")
    return [&r, &k, weight, n](int i) { k.layer_norm(r.at(i), weight, weight, 1e-5f, n, r.to(i)); };
  if (op == "add") return [&r, &k, n](int i) { k.add(r.to(i), r.at(i), n); };
  if (op == "silu_mul") return [&r, &k, n](int i) { k.silu_mul(r.at(i), r.at(i) + n, n); };
  if (op == "gelu_mul") return [&r, &k, n](int i) { k.gelu_mul(r.at(i), r.at(i) + n, n); };
  if (op == "quantize")
    return [&r, &k, n](int i) { k.quantize_row(r.at(i), n / kQuantDepth, r.blocks_at(i)); };
  if (op == "rotate")
    return [&r, &k, weight, n](int i) {
      for (int head = 0; head < n; head += kHeadDim)
        k.rotate(r.at(i) + head, weight, weight, kHeadDim / 2, std::sqrt(0.5f));
    };
  throw std::invalid_argument("no row kernel is called " + std::string(op));
}

}  // namespace

double time_rows(const Kernels& kernels, std::string_view op, int rows, int width, double seconds) {
  if (rows < 1 || width < kHeadDim || width % kHeadDim != 0)
    throw std::invalid_argument("rows must be positive, width a multiple of 64");
  constexpr int kLeastRows = 1024;  // between two looks at the clock
  Rows work(rows, width);
  const auto body = body_of(kernels, op, work);
  const int passes = std::max(1, kLeastRows / rows);
  return 1 / best_rate(seconds, [&] {
           for (int pass = 0; pass < passes; ++pass)
             for (int row = 0; row < rows; ++row) body(row);
           return double(passes);
         });
}

}  // namespace pyserve::profile
