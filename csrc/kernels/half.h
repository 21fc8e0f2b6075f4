// float16 as GGUF stores it, to float32: exact.
#pragma once

#include <bit>
#include <cstdint>

namespace pyserve {

inline float half_to_float(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7FFFu;
  // Shifted into float32's fields the exponent is 112 too small, of subnormals too: a product mends
  // both. Infinity and NaN have the top exponent there also.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const std::uint32_t bits =
      magnitude >= 0x7C00u ? 0x7F800000u | magnitude << 13 : std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(bits | (half & 0x8000u) << 16);
}

}  // namespace pyserve
