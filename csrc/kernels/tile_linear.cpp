#include "kernels/tile_linear.h"

#include <algorithm>
#include <cstring>

#include "kernels/half.h"

namespace pyserve {

namespace {

constexpr int kWide = 16;  // outputs of a tile

// Where elements of a tile lie: numbers as [16 pairs of depth][16 outputs][2]; bytes as [32][16];
// halves of bytes in words of eight, [4][16], the first in the lowest bits.
int number_index(int depth, int column) { return depth / 2 * 32 + column * 2 + depth % 2; }
int byte_index(int depth, int column) { return depth * kWide + column; }
int half_byte_index(int depth, int column) { return depth / 8 * 64 + column * 4 + depth % 8 / 2; }
int half_byte_bit(int depth) { return depth % 2 * 4; }

}  // namespace

TileLinear::TileLinear(const Kernels& kernels, int out, int in)
    : kernels_(&kernels),
      format_(nullptr),
      out_(out),
      in_(in),
      block_bytes_(kTileColumns * kTileDepth * sizeof(bf16)) {
  panels_ = Buffer(std::size_t(panels()) * blocks() * block_bytes_);
}

TileLinear::TileLinear(const Kernels& kernels, const StoredFormat& format, int out, int in)
    : kernels_(&kernels),
      format_(&format),
      out_(out),
      in_(in),
      block_bytes_(QuantPanel(format.packed_as).block_bytes()) {
  check_blocks(format, in);
  panels_ = Buffer(std::size_t(panels()) * blocks() * block_bytes_);
}

void TileLinear::pack(ThreadPool& pool, const float* weight) {
  pool.run(panels(), [&](int panel, int) {
    const int first = panel * kTileColumns;
    for (int column = 0; column < std::min(kTileColumns, out_ - first); ++column) {
      const float* row = weight + std::ptrdiff_t{first + column} * in_;
      for (int depth = 0; depth < in_; ++depth) {
        auto* tile = reinterpret_cast<bf16*>(block_at(panel, depth / kTileDepth)) +
                     column / kWide * kWide * kTileDepth;
        tile[number_index(depth % kTileDepth, column % kWide)] = from_float<bf16>(row[depth]);
      }
    }
  });
}

void TileLinear::pack_block(const StoredBlock& block, std::uint8_t* to, int column) const {
  const QuantPanel layout(format_->packed_as);
  std::memcpy(to + 2 * column, &block.scale, 2);
  if (quant_has_minimum(format_->packed_as))
    std::memcpy(to + 2 * (kTileColumns + column), &block.minimum, 2);
  std::uint8_t* tile = to + layout.scale_bytes + column / kWide * (layout.integer_bytes / 2);
  const bool bytes = quant_has_bytes(format_->packed_as);
  // Bytes without a minimum are signed here.
  const int offset = bytes ? quant_offset(format_->packed_as) : 0;
  for (int depth = 0; depth < kTileDepth; ++depth) {
    const int u = block.integers[depth];
    if (bytes) {
      tile[byte_index(depth, column % kWide)] = static_cast<std::uint8_t>(u - offset);
    } else {
      tile[half_byte_index(depth, column % kWide)] |=
          static_cast<std::uint8_t>(u << half_byte_bit(depth));
    }
  }
}

void TileLinear::pack(ThreadPool& pool, const std::uint8_t* stored) {
  const std::ptrdiff_t row_bytes = std::ptrdiff_t{in_ / format_->elements} * format_->bytes;
  const int each = format_->elements / kQuantDepth;
  pool.run(panels(), [&](int panel, int) {
    const int first = panel * kTileColumns;
    StoredBlock unpacked[kMaxStoredElements / kQuantDepth];
    for (int column = 0; column < std::min(kTileColumns, out_ - first); ++column) {
      const std::uint8_t* from = stored + (first + column) * row_bytes;
      for (int block = 0; block < blocks(); block += each, from += format_->bytes) {
        format_->unpack(from, unpacked);
        for (int i = 0; i < each; ++i) pack_block(unpacked[i], block_at(panel, block + i), column);
      }
    }
  });
}

void TileLinear::read_row(int i, float* to) const {
  const int panel = i / kTileColumns, column = i % kTileColumns;
  for (int block = 0; block < blocks(); ++block) {
    float* row = to + block * kTileDepth;
    const std::uint8_t* from = block_at(panel, block);
    if (format_ != nullptr)
      read_block(from, column, row);
    else
      for (int depth = 0; depth < std::min(kTileDepth, in_ - block * kTileDepth); ++depth)
        row[depth] = to_float(reinterpret_cast<const bf16*>(
            from)[column / kWide * kWide * kTileDepth + number_index(depth, column % kWide)]);
  }
}

void TileLinear::read_block(const std::uint8_t* block, int column, float* to) const {
  const QuantType type = format_->packed_as;
  const QuantPanel layout(type);
  const std::uint8_t* tile =
      block + layout.scale_bytes + column / kWide * (layout.integer_bytes / 2);
  const float d = half_at(block + 2 * column);
  const float m = quant_has_minimum(type) ? half_at(block + 2 * (kTileColumns + column)) : 0.0f;
  const int wide = column % kWide, offset = quant_offset(type);
  for (int depth = 0; depth < kTileDepth; ++depth) {
    const int integer =
        quant_has_bytes(type)
            ? static_cast<std::int8_t>(tile[byte_index(depth, wide)])
            : (tile[half_byte_index(depth, wide)] >> half_byte_bit(depth) & 0xF) - offset;
    to[depth] = static_cast<float>(integer) * d;
    if (quant_has_minimum(type)) to[depth] += m;
  }
}

void TileLinear::apply_panel(int panel, const bf16* a, std::ptrdiff_t lda, int rows,
                             const float* bias, float* c, std::ptrdiff_t ldc) const {
  const int column = panel * kTileColumns;
  const auto multiply = format_ == nullptr
                            ? kernels_->tile_gemm
                            : kernels_->quant_tile_gemm[static_cast<int>(format_->packed_as)];
  multiply({.a = a,
            .lda = lda,
            .rows = rows,
            .panel = block_at(panel, 0),
            .blocks = blocks(),
            .bias = bias == nullptr ? nullptr : bias + column,
            .c = c + column,
            .ldc = ldc,
            .columns = std::min(kTileColumns, out_ - column)});
}

}  // namespace pyserve
