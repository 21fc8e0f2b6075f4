#include "kernels/stored_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/half.h"

namespace pyserve {

namespace {

using Bytes = const std::uint8_t*;

// 4-bit integers of a block of 32: element i in the low half of byte i, i + 16 in the high one.
void low_then_high(Bytes from, std::uint8_t (&to)[kQuantDepth]) {
  for (int i = 0; i < 16; ++i) {
    to[i] = from[i] & 0x0F;
    to[i + 16] = from[i] >> 4;
  }
}

// The same with a fifth bit each, packed in the four bytes before.
void five_bits(Bytes from, int add, std::uint8_t (&to)[kQuantDepth]) {
  std::uint32_t fifth;
  std::memcpy(&fifth, from, sizeof fifth);
  low_then_high(from + 4, to);
  for (int i = 0; i < kQuantDepth; ++i)
    to[i] = static_cast<std::uint8_t>(to[i] + (fifth >> i & 1) * 16 + add);
}

// To 8 bits by the greatest magnitude, halves away from zero: as GGUF's reference quantiser.
void quantize(const float* x, StoredBlock& to) {
  std::uint32_t top_bits = 0;  // magnitudes compare as their bits, NaN above all others
  for (int i = 0; i < kQuantDepth; ++i)
    top_bits = std::max(top_bits, std::bit_cast<std::uint32_t>(x[i]) & 0x7FFFFFFFu);
  const float top = std::bit_cast<float>(top_bits);
  const float scale = top / 127.0f;
  to.scale = float_to_half(scale);
  to.minimum = 0;
  const float inverse = scale == 0.0f || top_bits >= 0x7F800000u ? 0.0f : 1.0f / scale;
  for (int i = 0; i < kQuantDepth; ++i) {
    const float scaled = std::min(std::abs(x[i] * inverse), 127.0f);
    const int whole = static_cast<int>(scaled);
    const int magnitude = whole + (scaled - static_cast<float>(whole) >= 0.5f);
    to.integers[i] = static_cast<std::uint8_t>(128 + (x[i] < 0.0f ? -magnitude : magnitude));
  }
}

void unpack_q8_0(Bytes from, StoredBlock* to) {
  to->scale = half_bits(from);
  for (int i = 0; i < kQuantDepth; ++i) to->integers[i] = from[2 + i] ^ 0x80;
}

void unpack_q4_0(Bytes from, StoredBlock* to) {
  to->scale = half_bits(from);
  low_then_high(from + 2, to->integers);
}

void unpack_q4_1(Bytes from, StoredBlock* to) {
  to->scale = half_bits(from);
  to->minimum = half_bits(from + 2);
  low_then_high(from + 4, to->integers);
}

void unpack_q5_0(Bytes from, StoredBlock* to) {
  to->scale = half_bits(from);
  five_bits(from + 2, quant_offset(QuantType::q8_0) - 16, to->integers);
}

void unpack_q5_1(Bytes from, StoredBlock* to) {
  to->scale = half_bits(from);
  to->minimum = half_bits(from + 2);
  five_bits(from + 4, 0, to->integers);
}

// Element b, l of 256 as eight groups of 32 is at [b][l] in all that follows.

// Group b's 6-bit scale and minimum, of the twelve bytes in Q4_K and Q5_K.
void set_k_scales(Bytes from, int b, StoredBlock& to) {
  const Bytes packed = from + 4;
  const int scale = b < 4 ? packed[b] & 0x3F : (packed[b + 4] & 0x0F) | (packed[b - 4] >> 6 << 4);
  const int minimum = b < 4 ? packed[b + 4] & 0x3F : (packed[b + 4] >> 4) | (packed[b] >> 6 << 4);
  to.scale = float_to_half(half_at(from) * static_cast<float>(scale));
  to.minimum = float_to_half(-half_at(from + 2) * static_cast<float>(minimum));
}

void unpack_q4_k(Bytes from, StoredBlock* to) {
  for (int b = 0; b < 8; ++b) {
    set_k_scales(from, b, to[b]);
    const Bytes packed = from + 16 + b / 2 * 32;
    for (int l = 0; l < 32; ++l) to[b].integers[l] = packed[l] >> b % 2 * 4 & 0x0F;
  }
}

void unpack_q5_k(Bytes from, StoredBlock* to) {
  for (int b = 0; b < 8; ++b) {
    set_k_scales(from, b, to[b]);
    const Bytes fifth = from + 16, packed = from + 48 + b / 2 * 32;
    for (int l = 0; l < 32; ++l)
      to[b].integers[l] =
          static_cast<std::uint8_t>((packed[l] >> b % 2 * 4 & 0x0F) | (fifth[l] >> b & 1) << 4);
  }
}

void unpack_q2_k(Bytes from, StoredBlock* to) {
  const float d = half_at(from + 80), d_minimum = half_at(from + 82);
  for (int b = 0; b < 8; ++b) {
    float values[kQuantDepth];
    for (int l = 0; l < 32; ++l) {
      const int scales = from[2 * b + l / 16];
      const int q = from[16 + b / 4 * 32 + l] >> b % 4 * 2 & 3;
      values[l] =
          d * static_cast<float>((scales & 0x0F) * q) - d_minimum * static_cast<float>(scales >> 4);
    }
    quantize(values, to[b]);
  }
}

void unpack_q3_k(Bytes from, StoredBlock* to) {
  const Bytes high = from, packed = from + 32, scales = from + 96;
  const float d = half_at(from + 108);
  for (int b = 0; b < 8; ++b) {
    float values[kQuantDepth];
    for (int l = 0; l < 32; ++l) {
      const int s = 2 * b + l / 16;
      const int scale = ((s < 8 ? scales[s] & 0x0F : scales[s - 8] >> 4) |
                         (scales[8 + s % 4] >> s / 4 * 2 & 3) << 4) -
                        32;
      const int q = (packed[b / 4 * 32 + l] >> b % 4 * 2 & 3) - (high[l] >> b & 1 ? 0 : 4);
      values[l] = d * static_cast<float>(scale * q);
    }
    quantize(values, to[b]);
  }
}

void unpack_q6_k(Bytes from, StoredBlock* to) {
  const Bytes low = from, high = from + 128, scales = from + 192;
  const float d = half_at(from + 208);
  for (int b = 0; b < 8; ++b) {
    const int half = b / 4, quarter = b % 4;
    const float steps[] = {d * static_cast<std::int8_t>(scales[2 * b]),
                           d * static_cast<std::int8_t>(scales[2 * b + 1])};
    float values[kQuantDepth];
    for (int l = 0; l < 32; ++l) {
      const int q = (low[64 * half + 32 * (quarter % 2) + l] >> quarter / 2 * 4 & 0x0F) |
                    (high[32 * half + l] >> 2 * quarter & 3) << 4;
      values[l] = steps[l / 16] * static_cast<float>(q - 32);
    }
    quantize(values, to[b]);
  }
}

constexpr std::int8_t kNonLinear[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};

void non_linear(Bytes from, StoredBlock& to) {
  low_then_high(from, to.integers);
  for (std::uint8_t& u : to.integers) u = static_cast<std::uint8_t>(kNonLinear[u] + 128);
}

void unpack_iq4_nl(Bytes from, StoredBlock* to) {
  to->scale = half_bits(from);
  non_linear(from + 2, *to);
}

void unpack_iq4_xs(Bytes from, StoredBlock* to) {
  const float d = half_at(from);
  const int high = half_bits(from + 2);
  for (int b = 0; b < 8; ++b) {
    const int scale = (from[4 + b / 2] >> b % 2 * 4 & 0x0F) | (high >> 2 * b & 3) << 4;
    to[b].scale = float_to_half(d * static_cast<float>(scale - 32));
    non_linear(from + 8 + 16 * b, to[b]);
  }
}

template <typename Element, typename ToFloat>
void quantize_elements(Bytes from, StoredBlock* to, ToFloat to_float) {
  Element stored[kQuantDepth];
  std::memcpy(stored, from, sizeof stored);
  float values[kQuantDepth];
  for (int i = 0; i < kQuantDepth; ++i) values[i] = to_float(stored[i]);
  quantize(values, *to);
}

void unpack_f32(Bytes from, StoredBlock* to) {
  quantize_elements<float>(from, to, [](float x) { return x; });
}

void unpack_f16(Bytes from, StoredBlock* to) {
  quantize_elements<std::uint16_t>(from, to, half_to_float);
}

void unpack_bf16(Bytes from, StoredBlock* to) {
  quantize_elements<std::uint16_t>(
      from, to, [](std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); });
}

constexpr std::array kFormats = {
    StoredFormat{"Q8_0", QuantType::q8_0, 32, 34, unpack_q8_0},
    StoredFormat{"Q4_0", QuantType::q4_0, 32, 18, unpack_q4_0},
    StoredFormat{"Q4_1", QuantType::q4_1, 32, 20, unpack_q4_1},
    StoredFormat{"Q5_0", QuantType::q8_0, 32, 22, unpack_q5_0},
    StoredFormat{"Q5_1", QuantType::q8_1, 32, 24, unpack_q5_1},
    StoredFormat{"Q2_K", QuantType::q8_0, 256, 84, unpack_q2_k},
    StoredFormat{"Q3_K", QuantType::q8_0, 256, 110, unpack_q3_k},
    StoredFormat{"Q4_K", QuantType::q4_1, 256, 144, unpack_q4_k},
    StoredFormat{"Q5_K", QuantType::q8_1, 256, 176, unpack_q5_k},
    StoredFormat{"Q6_K", QuantType::q8_0, 256, 210, unpack_q6_k},
    StoredFormat{"IQ4_NL", QuantType::q8_0, 32, 18, unpack_iq4_nl},
    StoredFormat{"IQ4_XS", QuantType::q8_0, 256, 136, unpack_iq4_xs},
    StoredFormat{"F32", QuantType::q8_0, 32, 128, unpack_f32},
    StoredFormat{"F16", QuantType::q8_0, 32, 64, unpack_f16},
    StoredFormat{"BF16", QuantType::q8_0, 32, 64, unpack_bf16},
};

}  // namespace

std::span<const StoredFormat> stored_formats() { return kFormats; }

void check_blocks(const StoredFormat& format, int elements) {
  if (elements % format.elements == 0 && elements % kQuantDepth == 0) return;
  throw std::invalid_argument("rows of " + std::to_string(elements) + " are no whole blocks of " +
                              std::to_string(std::max(format.elements, kQuantDepth)));
}

const StoredFormat* stored_format_named(std::string_view name) {
  const auto found = std::find_if(kFormats.begin(), kFormats.end(),
                                  [&](const StoredFormat& format) { return format.name == name; });
  return found == kFormats.end() ? nullptr : &*found;
}

}  // namespace pyserve
