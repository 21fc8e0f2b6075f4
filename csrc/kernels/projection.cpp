#include "kernels/projection.h"

#include <algorithm>

#include "profile/range.h"

namespace pyserve {

namespace {

// Fewer values are quantised sooner than another thread wakes.
constexpr int kValuesPerItem = 8192;

}  // namespace

QuantBlock* QuantizedRows::reserve(int rows, int blocks) {
  data_.reserve(std::size_t(rows) * blocks * sizeof(QuantBlock));
  return data_.as<QuantBlock>();
}

int Projection::Part::panels() const {
  return std::visit([](const auto& w) { return w.panels(); }, weight);
}

std::size_t Projection::bytes() const {
  std::size_t total = bias_.bytes();
  for (const Part& part : parts_)
    total += std::visit([](const auto& w) { return w.bytes(); }, part.weight);
  return total;
}

// The part that begins at that row, replaced if it was there.
Projection::Part& Projection::part_at(int at, std::variant<Linear, QuantLinear> weight) {
  const auto place = std::lower_bound(parts_.begin(), parts_.end(), at,
                                      [](const Part& part, int row) { return part.at < row; });
  if (place == parts_.end() || place->at != at)
    return *parts_.insert(place, Part{at, std::move(weight)});
  place->weight = std::move(weight);
  return *place;
}

void Projection::pack(ThreadPool& pool, const float* weight, int rows, int at) {
  Part& part = part_at(at, Linear(*kernels_, dtype_, rows, in_));
  std::get<Linear>(part.weight).pack(pool, weight);
}

void Projection::pack(ThreadPool& pool, const StoredFormat& format, const std::uint8_t* blocks,
                      int rows, int at) {
  Part& part = part_at(at, QuantLinear(*kernels_, format, rows, in_));
  std::get<QuantLinear>(part.weight).pack(pool, blocks);
}

void Projection::set_bias(std::span<const float> bias, int at) {
  const int padding = std::max(kernels_->panel_columns, kQuantColumns);
  if (bias_.bytes() == 0) bias_ = Buffer((out_ + padding) * sizeof(float));
  std::copy(bias.begin(), bias.end(), bias_.as<float>() + at);
}

void Projection::read_row(int i, float* to) const {
  const auto next = std::upper_bound(parts_.begin(), parts_.end(), i,
                                     [](int row, const Part& part) { return row < part.at; });
  const Part& part = *(next - 1);
  std::visit([&](const auto& w) { w.read_row(i - part.at, to); }, part.weight);
}

bool Projection::takes_floats() const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return std::holds_alternative<Linear>(part.weight); });
}

bool Projection::takes_blocks() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) {
    return std::holds_alternative<QuantLinear>(part.weight);
  });
}

const QuantBlock* Projection::quantize(ThreadPool& pool, const float* a, std::ptrdiff_t lda,
                                       int rows, QuantizedRows& work) const {
  if (!takes_blocks()) return nullptr;
  const int blocks = in_ / kQuantDepth;
  const profile::Range range(profile::Op::quantize, [&] {
    const double values = double(rows) * in_;
    return profile::Cost{
        .cached_bytes = values * (sizeof(float) + double(sizeof(QuantBlock)) / kQuantDepth),
        .float_operations = 4 * values};
  });
  QuantBlock* to = work.reserve(rows, blocks);
  const int per_item = std::max(1, kValuesPerItem / in_);
  const auto run = [&](int item, int) {
    for (int row = item * per_item; row < std::min(rows, (item + 1) * per_item); ++row)
      kernels_->quantize_row(a + row * lda, blocks, to + std::ptrdiff_t{row} * blocks);
  };
  const int items = (rows + per_item - 1) / per_item;
  if (items == 1)
    run(0, 0);
  else
    pool.run(items, run);
  return to;
}

void Projection::apply(ThreadPool& pool, const ProjectionInput& a, int rows, float* c,
                       std::ptrdiff_t ldc, int begin, int end) const {
  if (rows == 0) return;
  const auto starts_before = [](const Part& part, int row) { return part.at < row; };
  const auto first = std::lower_bound(parts_.begin(), parts_.end(), begin, starts_before);
  const auto last = std::lower_bound(first, parts_.end(), end, starts_before);
  int panels = 0;
  for (auto part = first; part != last; ++part) panels += part->panels();
  // Row blocks keep the rows of `a` in the second-level cache while panels pass by.
  const int row_block = kernels_->tile_rows * 16;
  pool.run(panels * ((rows + row_block - 1) / row_block), [&](int item, int) {
    const int row = item / panels * row_block, count = std::min(row_block, rows - row);
    int panel = item % panels;
    auto part = first;
    for (; panel >= part->panels(); ++part) panel -= part->panels();
    const float* bias = bias_.bytes() == 0 ? nullptr : bias_.as<float>() + part->at;
    float* to = c + row * ldc + part->at;
    if (const auto* dense = std::get_if<Linear>(&part->weight))
      dense->apply_panel(panel, a.floats + row * a.stride, a.stride, count, bias, to, ldc);
    else
      std::get<QuantLinear>(part->weight)
          .apply_panel(panel, a.blocks + std::ptrdiff_t{row} * blocks(), blocks(), count, bias, to,
                       ldc);
  });
}

profile::Cost Projection::cost(int rows, int begin, int end) const {
  profile::Cost cost;
  int out = 0;
  for (const Part& part : parts_) {
    if (part.at < begin || part.at >= end) continue;
    std::visit(
        [&]<typename Weight>(const Weight& w) {
          const double operations = 2.0 * rows * w.in() * w.out();
          out += w.out();
          cost.memory_bytes += double(w.bytes());
          if constexpr (std::is_same_v<Weight, QuantLinear>)
            cost.int_operations += operations;
          else
            cost.float_operations += operations;
        },
        part.weight);
  }
  cost.cached_bytes = double(rows) * (in_ + out) * sizeof(float);
  return cost;
}

}  // namespace pyserve
