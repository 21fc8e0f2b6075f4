// Keys and values into their page. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// x as scale times integers in [-127, 127], ties to even, by its greatest magnitude; returns the
// scale. The integers come as floats. Where one of x is not finite the scale is NaN.
inline float quantize_head(const float* x, int n, float* integers) {
  std::int32_t top_bits = 0;
  for (int i = 0; i < n; ++i) {
    // Magnitudes compare as the integers that they are stored as, infinity and NaN above all.
    std::int32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    top_bits = bits > top_bits ? bits : top_bits;
  }
  float top;
  __builtin_memcpy(&top, &top_bits, sizeof top);
  const bool finite = top_bits < 0x7F800000;
  const float inverse = finite && top >= kLeastTop ? 127.0f / top : 0.0f;
  for (int i = 0; i < n; ++i)
    integers[i] = finite ? (x[i] * inverse + kRounding) - kRounding : 0.0f;
  return finite ? top / 127.0f : __builtin_nanf("");
}

template <typename T>
void write_kv(const KvLayout& l, std::byte* pages, int offset, const float* key,
              const float* value) {
  for (int head = 0; head < l.kv_heads; ++head) {
    std::byte* page = pages + head * l.page_bytes;
    T* keys = reinterpret_cast<T*>(page) + offset;
    T* values = reinterpret_cast<T*>(page + l.values) + std::ptrdiff_t{offset} * l.value_stride;
    const float *k = key + head * l.head_dim, *v = value + head * l.head_dim;
    for (int i = 0; i < l.head_dim; ++i) {
      keys[std::ptrdiff_t{i} * l.key_stride] = from_float<T>(k[i]);
      values[i] = from_float<T>(v[i]);
    }
  }
}

template <>
inline void write_kv<bf16>(const KvLayout& l, std::byte* pages, int offset, const float* key,
                           const float* value) {
  constexpr int kPair = 2 * kLanes;
  const int paired = l.value_stride / kPair * kPair;
  for (int head = 0; head < l.kv_heads; ++head) {
    std::byte* page = pages + head * l.page_bytes;
    bf16* keys = reinterpret_cast<bf16*>(page) + 2 * std::ptrdiff_t{offset};
    bf16* values =
        reinterpret_cast<bf16*>(page + l.values) + std::ptrdiff_t{offset} * l.value_stride;
    const float *k = key + head * l.head_dim, *v = value + head * l.head_dim;
    for (int i = 0; i < l.head_dim; ++i)
      keys[std::ptrdiff_t{i / 2} * 2 * l.key_stride + i % 2] = from_float<bf16>(k[i]);
    for (int i = 0; i < l.head_dim; ++i) {
      const int at = i % kPair, lane = i < paired ? 2 * (at % kLanes) + at / kLanes : at;
      values[i - at + lane] = from_float<bf16>(v[i]);
    }
  }
}

template <>
inline void write_kv<std::int8_t>(const KvLayout& l, std::byte* pages, int offset, const float* key,
                                  const float* value) {
  const auto put = [](std::byte* page, std::ptrdiff_t scales, int at, float scale) {
    __builtin_memcpy(page + scales + 4 * std::ptrdiff_t{at}, &scale, sizeof scale);
  };
  for (int head = 0; head < l.kv_heads; ++head) {
    std::byte* page = pages + head * l.page_bytes;
    auto* keys = reinterpret_cast<std::uint8_t*>(page) + 4 * std::ptrdiff_t{offset};
    auto* values =
        reinterpret_cast<std::int8_t*>(page + l.values) + std::ptrdiff_t{offset} * l.value_stride;
    float integers[kMaxInt8HeadDim];
    put(page, l.key_scales, offset, quantize_head(key + head * l.head_dim, l.head_dim, integers));
    for (int i = 0; i < l.head_dim; ++i)
      keys[std::ptrdiff_t{i / 4} * 4 * l.key_stride + i % 4] =
          static_cast<std::uint8_t>(static_cast<int>(integers[i]) + 128);
    put(page, l.value_scales, offset,
        quantize_head(value + head * l.head_dim, l.head_dim, integers));
    for (int i = 0; i < l.head_dim; ++i)
      values[i] = static_cast<std::int8_t>(static_cast<int>(integers[i]));
  }
}

}  // namespace pyserve::PYSERVE_ISA
