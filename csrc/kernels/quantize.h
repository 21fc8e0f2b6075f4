// Activations to 8 bits. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// Combines all lanes by f, four at a time first: of integers, so in any order.
template <typename F>
PYSERVE_INLINE std::int32_t reduce_lanes(IntVec v, F f) {
  typedef std::int32_t Quad __attribute__((vector_size(16)));
  Quad quads[kLanes / 4];
  __builtin_memcpy(quads, &v, sizeof v);
  for (int i = 1; i < kLanes / 4; ++i) quads[0] = f(quads[0], quads[i]);
  const Quad q = quads[0];
  return f(f(q[0], q[1]), f(q[2], q[3]));
}

struct Greater {
  template <typename T>
  PYSERVE_INLINE T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct Add {
  template <typename T>
  PYSERVE_INLINE T operator()(T a, T b) const {
    return a + b;
  }
};

inline QuantBlock quantize_block(const float* x) {
  // Magnitudes compare as the integers that they are stored as, infinity and NaN above all others.
  IntVec top_bits = {};
  for (int i = 0; i < kQuantDepth; i += kLanes) {
    const IntVec bits = (IntVec)load(x + i) & 0x7FFFFFFF;
    top_bits = bits > top_bits ? bits : top_bits;
  }
  const std::int32_t top_of_all = reduce_lanes(top_bits, Greater{});
  QuantBlock block = {};
  if (top_of_all >= 0x7F800000) {
    block.scale = block.weighted_sum = __builtin_nanf("");
    return block;
  }
  float top;
  __builtin_memcpy(&top, &top_of_all, sizeof top);
  if (top < kLeastTop) return block;
  const Vec inverse = splat(127.0f / top);
  const Vec magic = splat(kRounding);
  IntVec sums = {};
  for (int i = 0; i < kQuantDepth; i += kLanes) {
    const IntVec rounded = (IntVec)(load(x + i) * inverse + magic) - 0x4B400000;
    sums += rounded;
    typedef std::int8_t ByteVec __attribute__((vector_size(kLanes)));
    const ByteVec bytes = __builtin_convertvector(rounded, ByteVec);
    __builtin_memcpy(block.values + i, &bytes, sizeof bytes);
  }
  const std::int32_t sum = reduce_lanes(sums, Add{});
  block.offset_8 = -8 * sum;
  block.offset_128 = -128 * sum;
  block.scale = top / 127.0f;
  block.weighted_sum = block.scale * static_cast<float>(sum);
  return block;
}

inline void quantize_row(const float* x, int blocks, QuantBlock* out) {
  for (int b = 0; b < blocks; ++b) out[b] = quantize_block(x + b * kQuantDepth);
}

}  // namespace pyserve::PYSERVE_ISA
