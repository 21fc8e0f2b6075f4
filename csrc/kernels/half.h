// float16 as GGUF stores it: to float32, exact, and from it, to the nearest with ties to even.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

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

// The bits that lie there, at any address.
inline std::uint16_t half_bits(const std::uint8_t* from) {
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

inline float half_at(const std::uint8_t* from) { return half_to_float(half_bits(from)); }

inline std::uint16_t float_to_half(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);   // NaN
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // over 65519
  if (magnitude < 0x38800000u) {
    // Subnormal there: a sum with 1/2 has the result in its last bits, rounded.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(sum) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1);
  return static_cast<std::uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

}  // namespace pyserve
