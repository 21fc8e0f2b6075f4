// The fastest that this instruction set multiplies 8-bit integers, for measuring what a kernel
// could reach. Included by isa_*.cpp only, after peak.h.
#pragma once

namespace pyserve::PYSERVE_ISA {

#if PYSERVE_LANES == 16
typedef __m512i PeakBytes;
PYSERVE_INLINE PeakBytes peak_dot(PeakBytes sum, PeakBytes a, PeakBytes b) {
  return _mm512_dpbusd_epi32(sum, a, b);
}
#elif PYSERVE_LANES == 8
typedef __m256i PeakBytes;
PYSERVE_INLINE PeakBytes peak_dot(PeakBytes sum, PeakBytes a, PeakBytes b) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
}
#else
// No byte products in what every processor has: 16 bits each.
typedef std::int16_t PeakBytes __attribute__((vector_size(16)));
PYSERVE_INLINE PeakBytes peak_dot(PeakBytes sum, PeakBytes a, PeakBytes b) { return sum + a * b; }
#endif

inline double peak_int(std::int64_t turns) {
  PeakBytes acc[kPeakChains] = {}, a = {}, b = {};
  conceal(a);
  conceal(b);
  for (std::int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kPeakChains; ++c) {
      acc[c] = peak_dot(acc[c], a, b);
      conceal(acc[c]);
    }
  }
  constexpr int kProducts = kLanes == 4 ? 8 : 4 * kLanes;
  return double(turns) * kPeakChains * kProducts * 2;
}

}  // namespace pyserve::PYSERVE_ISA
