// Tiles of float32 scores become tiles of bfloat16 weights. Included by attention_amx.h only.
#pragma once

#include "kernels/attention_amx_tiles.h"

namespace pyserve::PYSERVE_ISA {

// A row's scores of slots [begin, end): invisible.
PYSERVE_INLINE void hide(float* scores, int begin, int end) {
  for (int v = begin / kLanes; v * kLanes < end; ++v) {
    const int from = begin - v * kLanes, to = end - v * kLanes;
    const unsigned below = to < kLanes ? (1u << to) - 1 : 0xFFFFu;
    const unsigned above = from > 0 ? ~0u << from : ~0u;
    _mm512_mask_storeu_ps(scores + v * kTileFloats, static_cast<__mmask16>(below & above),
                          splat(-__builtin_inff()));
  }
}

// Hides what lies in slots [begin, end) and is not one of positions [visible_begin, visible_end).
inline void hide_all_but(const KvLayout& l, const Span& span, float* scores, int begin, int end,
                         int visible_begin, int visible_end) {
  int hidden = begin;
  while (visible_begin < visible_end) {
    // Without padding between them all blocks are as one.
    const bool padded = l.key_stride != l.block_size;
    const int block = padded ? visible_begin / l.block_size : span.first_block;
    const int start = block * l.block_size, slot = (block - span.first_block) * l.key_stride;
    const int stop =
        padded && start + l.block_size < visible_end ? start + l.block_size : visible_end;
    hide(scores, hidden, slot + visible_begin - start);
    hidden = slot + stop - start;
    visible_begin = stop;
  }
  hide(scores, hidden, end);
}

// 2^x for x <= 0 to 1e-4 of it, of which bfloat16 keeps 4e-3; exactly 0 below 2^-126, NaN for NaN.
PYSERVE_INLINE Vec exp2_roughly(Vec x) {
  // Not so small that the processor would need its slow way for results without leading digits.
  const __mmask16 normal = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
  // A mask of all lanes: GCC 12 warns that the plain intrinsic uses something uninitialised.
  const Vec r = _mm512_maskz_reduce_ps(0xFFFF, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = fma(splat(0.07706615f), r, splat(0.22764596f));
  p = fma(p, r, splat(0.69511657f));
  p = fma(p, r, splat(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, x);
}

// All lanes, by halves that stay in registers; the same numbers as sum_lanes.
PYSERVE_INLINE float add_lanes(Vec v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
  v += __builtin_shufflevector(v, v, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0);
  return v[0];
}

PYSERVE_INLINE float top_lane(Vec v) {
  v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
  v = max(v, __builtin_shufflevector(v, v, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0));
  return v[0];
}

// Turns a row's scores in the sixteens [first, last) into bfloat16 weights; invisible keys get 0.
// Sixteens are taken by pairs that begin at even ones, so that a lane of the sum has the same keys
// always. Their weights lie side by side, [pairs][kTileHeight][2][16], over scores that have been
// read. Meanwhile so many steps of `other` are done, and keys and values go on arriving.
inline void soften_tile_row(const KvLayout& l, float* scores, int first, int last, const Span& span,
                            int visible_begin, int visible_end, float& top, float& mass,
                            Weighing* other, int steps, Arrivals& arrivals) {
  first = first / 2 * 2;
  last = (last + 1) / 2 * 2;
  hide_all_but(l, span, scores, first * kLanes, last * kLanes, visible_begin, visible_end);
  Vec highest[2] = {splat(-__builtin_inff()), splat(-__builtin_inff())};
  for (int v = first; v < last; v += 2)
    for (int i = 0; i < 2; ++i) highest[i] = max(load(scores + (v + i) * kTileFloats), highest[i]);
  top = top_lane(max(highest[0], highest[1]));
  constexpr float kLog2E = 1.44269504f;
  // All hidden: -infinity stays so, where -infinity + infinity would be NaN.
  const Vec scale = splat(kLog2E), shift = splat(top == -__builtin_inff() ? 0.0f : -top * kLog2E);
  const auto ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  Vec sum = {};
  const auto soften_pair = [&](int v) __attribute__((always_inline)) {
    const float* at = scores + v * kTileFloats;
    const Vec low = exp2_roughly(fma(load(at), scale, shift));
    const Vec high = exp2_roughly(fma(load(at + kTileFloats), scale, shift));
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    __builtin_memcpy(scores + v / 2 * kTileFloats, &both, sizeof both);
    sum = _mm512_dpbf16_ps(sum, both, ones);
  };
  int v = first;
  for (; steps > 0 && v + 2 * kSums <= last; v += 2 * kSums, --steps) {
    other->part<0>();
    soften_pair(v);
    other->part<1>();
    soften_pair(v + 2);
    other->part<2>();
    soften_pair(v + 4);
    other->part<3>();
    soften_pair(v + 6);
  }
  for (; v < last; v += 2) {
    soften_pair(v);
    arrivals.fetch(Arrivals::kSoftenLines);
  }
  mass = add_lanes(sum);
}

}  // namespace pyserve::PYSERVE_ISA
