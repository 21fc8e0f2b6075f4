#include "kernels/quant_linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/half.h"

namespace pyserve {

std::optional<QuantType> quant_type_named(std::string_view name) {
  if (name == "Q8_0") return QuantType::q8_0;
  if (name == "Q4_0") return QuantType::q4_0;
  if (name == "Q4_1") return QuantType::q4_1;
  return std::nullopt;
}

int stored_block_bytes(QuantType type) {
  constexpr int kBytes[] = {34, 18, 20};
  return kBytes[static_cast<int>(type)];
}

QuantLinear::QuantLinear(const Kernels& kernels, QuantType type, int out, int in)
    : kernels_(&kernels), type_(type), layout_(type), out_(out), in_(in) {
  if (in % kQuantDepth != 0)
    throw std::invalid_argument("rows of " + std::to_string(in) + " are no whole blocks of 32");
  panels_ = Buffer(panels() * layout_.bytes(blocks()));
}

void QuantLinear::pack_row(const std::uint8_t* stored, std::uint8_t* panel, int column) const {
  const int half_bytes = layout_.scale_bytes / kQuantColumns;  // 2, or 4 with a minimum
  std::uint8_t* scales = panel + 2 * column;
  std::uint8_t* integers = panel + layout_.integers(blocks()) + 4 * column;
  const bool bytes = type_ == QuantType::q8_0;
  for (int b = 0; b < blocks(); ++b) {
    std::memcpy(scales, stored, 2);
    if (half_bytes == 4) std::memcpy(scales + 2 * kQuantColumns, stored + 2, 2);
    stored += half_bytes;
    // A byte of a 4-bit block holds depths i and i + 16 in the file, and here too.
    for (int i = 0; i < (bytes ? 32 : 16); ++i)
      integers[i / 4 * 4 * kQuantColumns + i % 4] = bytes ? stored[i] ^ 0x80 : stored[i];
    stored += bytes ? 32 : 16;
    scales += layout_.scale_bytes;
    integers += layout_.integer_bytes;
  }
}

void QuantLinear::pack(ThreadPool& pool, const std::uint8_t* stored) {
  const std::ptrdiff_t row_bytes = std::ptrdiff_t{blocks()} * stored_block_bytes(type_);
  pool.run(panels(), [&](int panel, int) {
    const int first = panel * kQuantColumns;
    for (int column = 0; column < std::min(kQuantColumns, out_ - first); ++column)
      pack_row(stored + (first + column) * row_bytes, panel_at(panel), column);
  });
}

void QuantLinear::read_row(int i, float* to) const {
  const std::uint8_t* panel = panel_at(i / kQuantColumns);
  const std::uint8_t* scales = panel + 2 * (i % kQuantColumns);
  const std::uint8_t* integers = panel + layout_.integers(blocks()) + 4 * (i % kQuantColumns);
  const auto half_at = [](const std::uint8_t* p) {
    std::uint16_t half;
    std::memcpy(&half, p, sizeof half);
    return half_to_float(half);
  };
  for (int b = 0; b < blocks(); ++b, to += kQuantDepth) {
    const float d = half_at(scales);
    const float m = type_ == QuantType::q4_1 ? half_at(scales + 2 * kQuantColumns) : 0.0f;
    for (int depth = 0; depth < kQuantDepth; ++depth) {
      const int i = type_ == QuantType::q8_0 ? depth : depth % 16;
      const int byte = integers[i / 4 * 4 * kQuantColumns + i % 4];
      const int u = type_ == QuantType::q8_0 ? byte : depth < 16 ? byte & 0x0F : byte >> 4;
      to[depth] = static_cast<float>(u - quant_offset(type_)) * d;
      if (type_ == QuantType::q4_1) to[depth] += m;
    }
    scales += layout_.scale_bytes;
    integers += layout_.integer_bytes;
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
