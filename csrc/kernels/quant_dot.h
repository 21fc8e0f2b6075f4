// Integer dot products of one block of 32 depths: rows of activations against a tile's columns.
// Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// Loads are what bounds a tall tile of one vector: each of weights and activations is used for
// several rows or vectors.
inline constexpr int kQuantVectors = kLanes == 4 ? 4 : 2;
inline constexpr int kQuantTileColumns = kQuantVectors * kLanes;
static_assert(kQuantColumns % kQuantTileColumns == 0);

// kLanes float16 numbers.
PYSERVE_INLINE Vec load_half(const std::uint8_t* p) {
#if PYSERVE_LANES == 16
  // All lanes by a mask: GCC 12 warns that the plain intrinsic uses something uninitialised.
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif PYSERVE_LANES == 8
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  std::uint16_t halves[kLanes];
  __builtin_memcpy(halves, p, sizeof halves);
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(halves[i]);
  return v;
#endif
}

// Four activations, as one 32-bit number.
PYSERVE_INLINE std::int32_t four(const QuantBlock& block, int depth) {
  std::int32_t bytes;
  __builtin_memcpy(&bytes, block.values + depth, sizeof bytes);
  return bytes;
}

// out[r][v] = sum over the block of (u - offset) * activation, exact, as floats.
#if PYSERVE_LANES == 16

template <QuantType Type, int Rows>
PYSERVE_INLINE void quant_dots(const std::uint8_t* integers, const QuantBlock* a,
                               std::ptrdiff_t lda, Vec (&out)[Rows][kQuantVectors]) {
  __m512i sums[Rows][kQuantVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    __m512i start = _mm512_setzero_si512();
    if constexpr (Type == QuantType::q8_0) start = _mm512_set1_epi32(a[r * lda].offset_128);
    if constexpr (Type == QuantType::q4_0) start = _mm512_set1_epi32(a[r * lda].offset_8);
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v) sums[r][v] = start;
  }
  const auto add = [&](const __m512i* weights, int depth) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m512i x = _mm512_set1_epi32(four(a[r * lda], depth));
#pragma GCC unroll 4
      for (int v = 0; v < kQuantVectors; ++v)
        sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], weights[v], x);
    }
  };
  const auto load_bytes = [&](int g, int v) __attribute__((always_inline)) {
    return _mm512_loadu_si512(integers + 4 * (kQuantColumns * g + kLanes * v));
  };
  constexpr int kGroups = quant_has_bytes(Type) ? 8 : 4;
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
    __m512i weights[kQuantVectors], high[kQuantVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v) weights[v] = load_bytes(g, v);
    if constexpr (!quant_has_bytes(Type)) {
#pragma GCC unroll 4
      for (int v = 0; v < kQuantVectors; ++v) {
        high[v] = (__m512i)((WordVec)weights[v] >> 4 & 0x0F0F0F0F);
        weights[v] = (__m512i)((WordVec)weights[v] & 0x0F0F0F0F);
      }
    }
    add(weights, 4 * g);
    if constexpr (!quant_has_bytes(Type)) add(high, 16 + 4 * g);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kQuantVectors; ++v)
      out[r][v] = __builtin_convertvector((IntVec)sums[r][v], Vec);
}

#elif PYSERVE_LANES == 8

// Products of bytes are summed in pairs to 16 bits, which saturate: what is multiplied keeps clear
// of that. Q8_0 multiplies |w| by the activation with w's sign, at most 2 * 128 * 127; bytes with a
// minimum are at most 127; eight pairs of 4-bit weights come to at most 8 * 2 * 15 * 127.
template <QuantType Type, int Rows>
PYSERVE_INLINE void quant_dots(const std::uint8_t* integers, const QuantBlock* a,
                               std::ptrdiff_t lda, Vec (&out)[Rows][kQuantVectors]) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int v = 0; v < kQuantVectors; ++v) {
    const auto load_bytes = [&](int g) __attribute__((always_inline)) {
      return _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(integers + 4 * (kQuantColumns * g + kLanes * v)));
    };
    __m256i sums[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sums[r] = _mm256_setzero_si256();
    if constexpr (Type == QuantType::q8_0) {
      for (int g = 0; g < 8; ++g) {
        const __m256i weights = _mm256_xor_si256(load_bytes(g), _mm256_set1_epi8(-128));
        const __m256i magnitude = _mm256_abs_epi8(weights);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          const __m256i x = _mm256_set1_epi32(four(a[r * lda], 4 * g));
          const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, weights));
          sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
        }
      }
    } else if constexpr (Type == QuantType::q8_1) {
      for (int g = 0; g < 8; ++g) {
        const __m256i weights = load_bytes(g);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          const __m256i x = _mm256_set1_epi32(four(a[r * lda], 4 * g));
          const __m256i pairs = _mm256_maddubs_epi16(weights, x);
          sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
        }
      }
    } else {
      const __m256i low = _mm256_set1_epi8(0x0F);
      for (int g = 0; g < 4; ++g) {
        const __m256i packed = load_bytes(g);
        const __m256i first = _mm256_and_si256(packed, low);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          const QuantBlock& x = a[r * lda];
          const __m256i p = _mm256_maddubs_epi16(first, _mm256_set1_epi32(four(x, 4 * g)));
          const __m256i q = _mm256_maddubs_epi16(second, _mm256_set1_epi32(four(x, 16 + 4 * g)));
          sums[r] = _mm256_add_epi16(sums[r], _mm256_add_epi16(p, q));
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        sums[r] = _mm256_madd_epi16(sums[r], ones);
        if constexpr (Type == QuantType::q4_0)
          sums[r] = _mm256_add_epi32(sums[r], _mm256_set1_epi32(a[r * lda].offset_8));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) out[r][v] = _mm256_cvtepi32_ps(sums[r]);
  }
}

#else

// Floats hold these integers exactly: no sum reaches 2^24.
template <QuantType Type, int Rows>
PYSERVE_INLINE void quant_dots(const std::uint8_t* integers, const QuantBlock* a,
                               std::ptrdiff_t lda, Vec (&out)[Rows][kQuantVectors]) {
  alignas(64) float weights[kQuantDepth][kQuantTileColumns];
  constexpr int kOffset = quant_offset(Type);
  constexpr int kGroups = quant_has_bytes(Type) ? 8 : 4;
  for (int g = 0; g < kGroups; ++g)
    for (int c = 0; c < kQuantTileColumns; ++c)
      for (int j = 0; j < 4; ++j) {
        const int byte = integers[(g * kQuantColumns + c) * 4 + j];
        if constexpr (quant_has_bytes(Type)) {
          weights[4 * g + j][c] = static_cast<float>(byte - kOffset);
        } else {
          weights[4 * g + j][c] = static_cast<float>((byte & 0x0F) - kOffset);
          weights[16 + 4 * g + j][c] = static_cast<float>((byte >> 4) - kOffset);
        }
      }
  for (int r = 0; r < Rows; ++r) {
    Vec sums[kQuantVectors] = {};
    for (int p = 0; p < kQuantDepth; ++p) {
      const Vec x = splat(static_cast<float>(a[r * lda].values[p]));
      for (int v = 0; v < kQuantVectors; ++v)
        sums[v] = fma(x, load(weights[p] + v * kLanes), sums[v]);
    }
    for (int v = 0; v < kQuantVectors; ++v) out[r][v] = sums[v];
  }
}

#endif

}  // namespace pyserve::PYSERVE_ISA
