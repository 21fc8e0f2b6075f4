// Float vectors of PYSERVE_LANES lanes, for the instruction set this file is compiled for.
//
// Written on GCC/Clang vector extensions; fma is explicit, so no contraction differs between two
// tile shapes (the build also passes -ffp-contract=off). Included by isa_*.cpp only.
#pragma once

#define PYSERVE_INLINE inline __attribute__((always_inline))

namespace pyserve::PYSERVE_ISA {

inline constexpr int kLanes = PYSERVE_LANES;

typedef float Vec __attribute__((vector_size(4 * PYSERVE_LANES)));
typedef std::int32_t IntVec __attribute__((vector_size(4 * PYSERVE_LANES)));
typedef std::uint16_t HalfVec __attribute__((vector_size(2 * PYSERVE_LANES)));
typedef std::uint32_t WordVec __attribute__((vector_size(4 * PYSERVE_LANES)));

PYSERVE_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

PYSERVE_INLINE Vec load(const bf16* p) {
  HalfVec h;
  __builtin_memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, WordVec) << 16);
}

PYSERVE_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

// The first n lanes, the others zero; n in [0, kLanes].
PYSERVE_INLINE Vec load_first(const float* p, int n) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

PYSERVE_INLINE void store_first(float* p, Vec v, int n) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

PYSERVE_INLINE Vec splat(float x) { return x - Vec{}; }

PYSERVE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if PYSERVE_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif PYSERVE_LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// 1.5 * 2^23: adding it rounds to an integer, ties to even.
inline constexpr float kRounding = 12582912.0f;
// Numbers whose greatest magnitude is below count as zero when they become 8-bit integers: 127 /
// top would overflow soon after.
inline constexpr float kLeastTop = 1e-30f;

PYSERVE_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

// Lanes are combined by halves, always in the same order.
PYSERVE_INLINE float sum_lanes(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

PYSERVE_INLINE float max_lanes(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  float top = lanes[0];
  for (int i = 1; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
  return top;
}

// e^x to about 1 ulp (Cephes' polynomial); exactly 1 at 0, exactly 0 below -87.3, NaN for NaN.
PYSERVE_INLINE Vec exp(Vec x) {
  const Vec low = splat(-87.33654f), high = splat(88.3762f);
  const Vec clamped = x < low ? low : (x > high ? high : x);
  const Vec magic = splat(kRounding);
  const Vec shifted = fma(clamped, splat(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  const IntVec exponent = (IntVec)shifted - 0x4B400000;
  const Vec scaled = p * (Vec)((exponent + 127) << 23);
  return x < low ? Vec{} : scaled;
}

// 1 / x to about 1 ulp for x in [1, 2^126), to 0 above: an estimate of 14 bits and a step of
// Newton's where division takes as long as ten multiplications.
PYSERVE_INLINE Vec reciprocal(Vec x) {
#if PYSERVE_LANES == 16
  const Vec estimate = _mm512_maskz_rcp14_ps(0xFFFF, x);
  return estimate * fma(-x, estimate, splat(2.0f));
#else
  return splat(1.0f) / x;
#endif
}

// Memory to bring near while a loop runs: `step` more bytes of it at each turn; nothing at step 0.
struct Ahead {
  const char* from = nullptr;
  std::ptrdiff_t step = 0;
};

// Adds a[r, p] * b_v[p, lanes] to acc[r][v], p ascending over [0, depth): the one inner loop that
// matrix products and attention share. Every acc lane is its own chain, so tile shapes do not
// change bits.
template <int Rows, int Vectors, typename T, bool Prefetch = false>
PYSERVE_INLINE void accumulate(Vec (&acc)[Rows][Vectors], const float* a, std::ptrdiff_t lda,
                               const T* const (&b)[Vectors], std::ptrdiff_t ldb, int depth,
                               Ahead ahead = {}) {
  for (int p = 0; p < depth; ++p) {
    if constexpr (Prefetch)
      for (std::ptrdiff_t i = 0; i < ahead.step; i += 64)
        __builtin_prefetch(ahead.from + p * ahead.step + i);
    Vec column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) column[v] = load(b[v] + p * ldb);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec value = splat(a[r * lda + p]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(value, column[v], acc[r][v]);
    }
  }
}

// Calls f.template operator()<Rows>() with Rows == rows, 1 <= rows <= the greatest.
template <int Rows = PYSERVE_TILE_ROWS, typename F>
PYSERVE_INLINE void with_rows(int rows, F&& f) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return with_rows<Rows - 1>(rows, f);
  }
  f.template operator()<Rows>();
}

inline constexpr int kTileRows = PYSERVE_TILE_ROWS;

// Rows of the next tile when `left` remain: even shares, so that no tile is left thin.
template <int Rows = kTileRows>
PYSERVE_INLINE int next_tile_rows(int left) {
  const int tiles = (left + Rows - 1) / Rows;
  return (left + tiles - 1) / tiles;
}

}  // namespace pyserve::PYSERVE_ISA
