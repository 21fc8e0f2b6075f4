// Types of weights as files store them, and how each becomes the integers that kernels multiply.
//
// Layouts are those of ggml-common.h. What a kernel's type holds exactly is kept exactly: Q8_0,
// Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL always; Q4_K, Q5_K and IQ4_XS but for a product of two scales,
// which is rounded to float16 (2^-11 of it, far below half a step of their integers). Q2_K, Q3_K
// and Q6_K have a scale for each 16 elements: they are re-blocked, as are floats, to 8 bits over 32
// by the greatest magnitude. That adds at most 0.53 / 127 of it to an element's error, an eighth
// of the step of Q6_K where its 32 elements have like scales.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/kernels.h"

namespace pyserve {

// 32 weights as integers u, each scale * (u - quant_offset) + minimum; both float16.
struct StoredBlock {
  std::uint16_t scale;
  std::uint16_t minimum;
  std::uint8_t integers[kQuantDepth];
};

inline constexpr int kMaxStoredElements = 256;

struct StoredFormat {
  std::string_view name;  // GGUF's
  QuantType packed_as;
  int elements;  // of a block in the file, a multiple of 32
  int bytes;     // of a block in the file
  // Makes elements / 32 blocks of one in the file.
  void (*unpack)(const std::uint8_t* from, StoredBlock* to);
};

std::span<const StoredFormat> stored_formats();
// Throws std::invalid_argument where rows of so many elements are no whole blocks.
void check_blocks(const StoredFormat& format, int elements);
// By GGUF's name, such as "Q4_1"; null for a type that has no kernels.
const StoredFormat* stored_format_named(std::string_view name);

}  // namespace pyserve
