#include "kernels/quant_linear.h"

#include <algorithm>
#include <cstring>

#include "kernels/half.h"

namespace pyserve {

QuantLinear::QuantLinear(const Kernels& kernels, const StoredFormat& format, int out, int in)
    : kernels_(&kernels),
      format_(&format),
      type_(format.packed_as),
      layout_(type_),
      out_(out),
      in_(in) {
  check_blocks(format, in);
  panels_ = Buffer(panels() * layout_.bytes(blocks()));
}

void QuantLinear::pack_block(const StoredBlock& block, int index, std::uint8_t* panel,
                             int column) const {
  std::uint8_t* scales = panel + layout_.bytes(index) + 2 * column;
  std::memcpy(scales, &block.scale, 2);
  if (quant_has_minimum(type_)) std::memcpy(scales + 2 * kQuantColumns, &block.minimum, 2);
  std::uint8_t* integers = panel + layout_.bytes(index) + layout_.scale_bytes + 4 * column;
  const auto put = [&](int i, int value) {
    integers[i / 4 * 4 * kQuantColumns + i % 4] = static_cast<std::uint8_t>(value);
  };
  if (quant_has_bytes(type_))
    for (int i = 0; i < 32; ++i) put(i, block.integers[i]);
  else
    for (int i = 0; i < 16; ++i) put(i, block.integers[i] | block.integers[i + 16] << 4);
}

void QuantLinear::pack_row(const std::uint8_t* stored, std::uint8_t* panel, int column) const {
  StoredBlock unpacked[kMaxStoredElements / kQuantDepth];
  const int each = format_->elements / kQuantDepth;
  for (int b = 0; b < blocks(); b += each, stored += format_->bytes) {
    format_->unpack(stored, unpacked);
    for (int i = 0; i < each; ++i) pack_block(unpacked[i], b + i, panel, column);
  }
}

void QuantLinear::pack(ThreadPool& pool, const std::uint8_t* stored) {
  const std::ptrdiff_t row_bytes = std::ptrdiff_t{in_ / format_->elements} * format_->bytes;
  pool.run(panels(), [&](int panel, int) {
    const int first = panel * kQuantColumns;
    for (int column = 0; column < std::min(kQuantColumns, out_ - first); ++column)
      pack_row(stored + (first + column) * row_bytes, panel_at(panel), column);
  });
}

void QuantLinear::read_row(int i, float* to) const {
  const std::uint8_t* panel = panel_at(i / kQuantColumns);
  const std::uint8_t* scales = panel + 2 * (i % kQuantColumns);
  const std::uint8_t* integers = panel + layout_.scale_bytes + 4 * (i % kQuantColumns);
  for (int b = 0; b < blocks(); ++b, to += kQuantDepth) {
    const float d = half_at(scales);
    const float m = quant_has_minimum(type_) ? half_at(scales + 2 * kQuantColumns) : 0.0f;
    for (int depth = 0; depth < kQuantDepth; ++depth) {
      const int i = quant_has_bytes(type_) ? depth : depth % 16;
      const int byte = integers[i / 4 * 4 * kQuantColumns + i % 4];
      const int u = quant_has_bytes(type_) ? byte : depth < 16 ? byte & 0x0F : byte >> 4;
      to[depth] = static_cast<float>(u - quant_offset(type_)) * d;
      if (quant_has_minimum(type_)) to[depth] += m;
    }
    scales += layout_.block_bytes();
    integers += layout_.block_bytes();
  }
}

void QuantLinear::apply_panel(int panel, const QuantBlock* a, std::ptrdiff_t lda, int rows,
                              const float* bias, float* c, std::ptrdiff_t ldc) const {
  const int column = panel * kQuantColumns;
  kernels_->quant_gemm[static_cast<int>(type_)](
      {.a = a,
       .lda = lda,
       .rows = rows,
       .panel = panel_at(panel),
       .blocks = blocks(),
       .bias = bias == nullptr ? nullptr : bias + column,
       .c = c + column,
       .ldc = ldc,
       .columns = std::min(kQuantColumns, out_ - column)});
}

}  // namespace pyserve
