// Quantised weights to tiles of bfloat16. Included by isa_amx.cpp only.
//
// A weight d * u + m is made kUnbias times as large and then cut off after bfloat16's 8 bits: one
// operation less than rounding to nearest, with an error of the same size and no bias.
#pragma once

namespace pyserve::PYSERVE_ISA {

// What is cut off is half a unit on average, and a unit is 2^-7 to 2^-8 of a number.
inline constexpr float kUnbias = 1.0f + 0.75f / 256;

// A tile's row has two neighbours in depth of each output: in the low halves, and in the high ones.
PYSERVE_INLINE void store_row(bf16* tile, int row, Vec low, Vec high) {
  constexpr int kSelect = 0xCA;  // of the first's bits, 1: the second's, 0: the third's
  const __m512i pairs = _mm512_ternarylogic_epi32(_mm512_set1_epi32(-65536), (__m512i)high,
                                                  (__m512i)((WordVec)low >> 16), kSelect);
  __builtin_memcpy(tile + row * kTileDepth, &pairs, sizeof pairs);
}

// 16 float16 numbers, for kUnbias.
PYSERVE_INLINE Vec load_scales(const std::uint8_t* from) {
  // All lanes by a mask: GCC 12 warns that the plain intrinsics use something uninitialised.
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_maskz_cvtph_ps(0xFFFF, halves) * splat(kUnbias);
}

// Bytes lie as [16 rows][2][16 outputs].
template <QuantType Type>
PYSERVE_INLINE void unpack_bytes(const std::uint8_t* integers, Vec d, Vec m, bf16* tile) {
#pragma GCC unroll 4
  for (int row = 0; row < kTileHeight; ++row) {
    Vec values[2];
    for (int parity = 0; parity < 2; ++parity) {
      const auto* from = reinterpret_cast<const __m128i*>(integers + row * 32 + parity * 16);
      const __m512i wide = _mm512_maskz_cvtepi8_epi32(0xFFFF, _mm_loadu_si128(from));
      const Vec u = __builtin_convertvector((IntVec)wide, Vec);
      values[parity] = quant_has_minimum(Type) ? fma(u, d, m) : u * d;
    }
    store_row(tile, row, values[0], values[1]);
  }
}

// Halves of bytes lie as 32-bit words [4][16 outputs], eight in depth in a word from its low bits
// on. They become the last bits of a float32 near 2^e where they are, or moved by one of two
// shifts; what that adds to them is taken off in m.
template <QuantType Type>
PYSERVE_INLINE void unpack_nibbles(const std::uint8_t* integers, Vec d, Vec m, bf16* tile) {
  constexpr int kFirst = 2, kPlaces = 3;  // the second to fourth halves of bytes in a word
  Vec minimum[kPlaces];
  for (int place = 0; place < kPlaces; ++place) {
    const auto magic = static_cast<float>(1 << (23 - 4 * (place + kFirst)));
    minimum[place] = quant_has_minimum(Type)
                         ? fma(d, splat(-magic), m)
                         : d * splat(-magic - static_cast<float>(quant_offset(Type)));
  }
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word) {
    WordVec moved[3];  // 0 and 1 raised, 2 to 4, 5 to 7 lowered
    __builtin_memcpy(&moved[1], integers + word * 64, sizeof moved[1]);
    moved[0] = moved[1] << 8;
    moved[2] = moved[1] >> 12;
    const auto value = [&](int j) {
      constexpr int kAndOr = 0xEA;  // a & b | c
      const int place = j < 2 ? j : (j - 2) % 3, bit = 4 * (place + kFirst);
      const Vec u = (Vec)_mm512_ternarylogic_epi32(
          (__m512i)moved[j < 2   ? 0
                         : j < 5 ? 1
                                 : 2],
          _mm512_set1_epi32(0xF << bit), _mm512_set1_epi32((127 + 23 - bit) << 23), kAndOr);
      return fma(u, d, minimum[place]);
    };
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair)
      store_row(tile, 4 * word + pair, value(2 * pair), value(2 * pair + 1));
  }
}

// One of the two tiles of a panel's block, 32 deep.
template <QuantType Type>
PYSERVE_INLINE void unpack_tile(const std::uint8_t* block, int side, bf16* tile) {
  constexpr QuantPanel kPanel(Type);
  const Vec d = load_scales(block + side * 32);
  const Vec m = quant_has_minimum(Type) ? load_scales(block + 64 + side * 32) : Vec{};
  const std::uint8_t* integers = block + kPanel.scale_bytes + side * (kPanel.integer_bytes / 2);
  if constexpr (quant_has_bytes(Type))
    unpack_bytes<Type>(integers, d, m, tile);
  else
    unpack_nibbles<Type>(integers, d, m, tile);
}

}  // namespace pyserve::PYSERVE_ISA
