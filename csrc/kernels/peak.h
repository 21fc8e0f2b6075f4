// The fastest that this instruction set multiplies and reads, for measuring what a kernel could
// reach. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// Hides from the compiler what a register holds, so that it computes what is only measured.
template <typename T>
PYSERVE_INLINE void conceal(T& value) {
#if defined(__x86_64__) && PYSERVE_LANES > 4
  asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#endif
}

// More chains than two pipes of four cycles each keep busy.
inline constexpr int kPeakChains = 12;

inline double peak_float(std::int64_t turns) {
  Vec acc[kPeakChains] = {}, a = {}, b = {};
  conceal(a);
  conceal(b);
  for (std::int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kPeakChains; ++c) {
      acc[c] = fma(a, b, acc[c]);
      conceal(acc[c]);
    }
  }
  return double(turns) * kPeakChains * kLanes * 2;
}

// Loads four streams at once, which memory serves a little faster than one.
inline void read_bytes(const char* from, std::size_t bytes) {
  constexpr int kStreams = 4, kVectors = 2;
  IntVec sums[kStreams][kVectors] = {};
  const std::size_t share = bytes / kStreams;
  for (std::size_t at = 0; at + sizeof sums[0] <= share; at += sizeof sums[0]) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        IntVec value;
        __builtin_memcpy(&value, from + s * share + at + v * sizeof value, sizeof value);
        sums[s][v] ^= value;
      }
  }
#pragma GCC unroll 4
  for (int s = 0; s < kStreams; ++s)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) conceal(sums[s][v]);
}

}  // namespace pyserve::PYSERVE_ISA
