// bfloat16 as storage: arithmetic happens in float32.
#pragma once

#include <bit>
#include <cstdint>

namespace pyserve {

struct bf16 {
  std::uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline bf16 from_float<bf16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return bf16{static_cast<std::uint16_t>((bits >> 16) | 0x40)};
  return bf16{static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace pyserve
