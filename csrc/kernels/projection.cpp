#include "kernels/projection.h"

#include <algorithm>

#include "profile/range.h"

namespace pyserve {

namespace {

// Fewer values are quantised sooner than another thread wakes.
constexpr int kValuesPerItem = 8192;

}  // namespace

void NarrowRows::reserve(int rows, int elements) {
  blocks_.reserve(std::size_t(rows) * (elements / kQuantDepth) * sizeof(QuantBlock));
  halves_.reserve(round_up(rows, kTileRowGroup) * half_stride(elements) * sizeof(bf16));
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

std::byte* Projection::move_to(std::byte* place) {
  for (Part& part : parts_)
    place = std::visit([&](auto& w) { return w.move_to(place); }, part.weight);
  return place;
}

// The part that begins at that row, replaced if it was there.
Projection::Part& Projection::part_at(int at, Weight weight) {
  const auto place = std::lower_bound(parts_.begin(), parts_.end(), at,
                                      [](const Part& part, int row) { return part.at < row; });
  if (place == parts_.end() || place->at != at)
    return *parts_.insert(place, Part{at, std::move(weight)});
  place->weight = std::move(weight);
  return *place;
}

void Projection::pack(ThreadPool& pool, const float* weight, int rows, int at) {
  if (dtype_ == DType::bfloat16 && kernels_->tile_gemm != nullptr) {
    Part& part = part_at(at, TileLinear(*kernels_, rows, in_));
    return std::get<TileLinear>(part.weight).pack(pool, weight);
  }
  Part& part = part_at(at, Linear(*kernels_, dtype_, rows, in_));
  std::get<Linear>(part.weight).pack(pool, weight);
}

void Projection::pack(ThreadPool& pool, const StoredFormat& format, const std::uint8_t* blocks,
                      int rows, int at) {
  if (kernels_->tile_gemm != nullptr) {
    Part& part = part_at(at, TileLinear(*kernels_, format, rows, in_));
    return std::get<TileLinear>(part.weight).pack(pool, blocks);
  }
  Part& part = part_at(at, QuantLinear(*kernels_, format, rows, in_));
  std::get<QuantLinear>(part.weight).pack(pool, blocks);
}

void Projection::set_bias(std::span<const float> bias, int at) {
  const int padding = std::max({kernels_->panel_columns, kQuantColumns, kTileColumns});
  if (bias_.bytes() == 0) bias_ = Buffer((out_ + padding) * sizeof(float));
  std::copy(bias.begin(), bias.end(), bias_.as<float>() + at);
}

void Projection::read_row(int i, float* to) const {
  const auto next = std::upper_bound(parts_.begin(), parts_.end(), i,
                                     [](int row, const Part& part) { return row < part.at; });
  const Part& part = *(next - 1);
  std::visit([&](const auto& w) { w.read_row(i - part.at, to); }, part.weight);
}

void Projection::prepare_row(const float* a, int i, const NarrowRows& to) const {
  if (takes<QuantLinear>()) kernels_->quantize_row(a, in_ / kQuantDepth, to.blocks(i, in_));
  if (takes<TileLinear>()) kernels_->round_row(a, in_, to.halves(i, in_));
}

void Projection::prepare(ThreadPool& pool, const float* a, std::ptrdiff_t lda, int rows,
                         const NarrowRows& to) const {
  if (!takes<QuantLinear>() && !takes<TileLinear>()) return;
  const profile::Range range(profile::Op::quantize, [&] {
    const double values = double(rows) * in_;
    return profile::Cost{
        .cached_bytes = values * (sizeof(float) + double(sizeof(QuantBlock)) / kQuantDepth),
        .float_operations = 4 * values};
  });
  const int per_item = std::max(1, kValuesPerItem / in_);
  const auto run = [&](int item, int) {
    for (int row = item * per_item; row < std::min(rows, (item + 1) * per_item); ++row)
      prepare_row(a + row * lda, row, to);
  };
  const int items = (rows + per_item - 1) / per_item;
  if (items == 1)
    run(0, 0);
  else
    pool.run(items, run);
}

// Rows of the input that stay in the second-level cache while panels pass by. Of many rows every
// thread gets its own ones, the same as of loops over rows, rather than its own panels: what it
// reads, it wrote. Few rows would be too few for the weights that it has to unpack for them.
int Projection::row_block(int rows, int threads) const {
  if (!takes<TileLinear>()) return kernels_->tile_rows * 16;
  constexpr int kBytes = 512 << 10, kManyRows = 128;  // of a thread
  const int most = std::max(1, kBytes / (in_ * static_cast<int>(sizeof(bf16))));
  int blocks = (rows + most - 1) / most;
  if (rows >= kManyRows * threads) blocks = static_cast<int>(round_up(blocks, threads));
  return static_cast<int>(round_up((rows + blocks - 1) / blocks, kTileRowGroup));
}

void Projection::apply_panel(const Part& part, int panel, const ProjectionInput& a, int row,
                             int rows, float* c, std::ptrdiff_t ldc) const {
  const float* bias = bias_.bytes() == 0 ? nullptr : bias_.as<float>() + part.at;
  if (const auto* dense = std::get_if<Linear>(&part.weight))
    dense->apply_panel(panel, a.floats + row * a.stride, a.stride, rows, bias, c, ldc);
  else if (const auto* quantized = std::get_if<QuantLinear>(&part.weight))
    quantized->apply_panel(panel, a.narrow->blocks(row, in_), in_ / kQuantDepth, rows, bias, c,
                           ldc);
  else
    std::get<TileLinear>(part.weight)
        .apply_panel(panel, a.narrow->halves(row, in_), NarrowRows::half_stride(in_), rows, bias, c,
                     ldc);
}

void Projection::apply(ThreadPool& pool, const ProjectionInput& a, int rows, float* c,
                       std::ptrdiff_t ldc, int begin, int end) const {
  if (rows == 0) return;
  const auto starts_before = [](const Part& part, int row) { return part.at < row; };
  const auto first = std::lower_bound(parts_.begin(), parts_.end(), begin, starts_before);
  const auto last = std::lower_bound(first, parts_.end(), end, starts_before);
  int panels = 0;
  for (auto part = first; part != last; ++part) panels += part->panels();
  const int row_block = this->row_block(rows, pool.size());
  pool.run(panels * ((rows + row_block - 1) / row_block), [&](int item, int) {
    const int row = item / panels * row_block, count = std::min(row_block, rows - row);
    int panel = item % panels;
    auto part = first;
    for (; panel >= part->panels(); ++part) panel -= part->panels();
    apply_panel(*part, panel, a, row, count, c + row * ldc + part->at, ldc);
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
          else if constexpr (std::is_same_v<Weight, TileLinear>)
            cost.tile_operations += operations;
          else
            cost.float_operations += operations;
        },
        part.weight);
  }
  cost.cached_bytes = double(rows) * (in_ + out) * sizeof(float);
  return cost;
}

}  // namespace pyserve
