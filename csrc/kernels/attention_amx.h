// Attention to bfloat16 keys and values by tile registers. Included by isa_amx.cpp only.
//
// Sixteen query rows against sixteen keys are one tile of scores; sixteen keys' weights against
// their values are added to tiles of outputs. Queries and weights are rounded to bfloat16, sums are
// float32, and the mass is that of the rounded weights, so that what is divided by is what was
// added up. Spans and their merging are those of attention.h. A tile instruction's order of
// additions is fixed, and the depth that each takes depends on the layout alone: one row or many,
// the bits are the same.
#pragma once

#include "kernels/attention.h"
// attention.h first: the other builds on it.
#include "kernels/attention_amx_soften.h"

namespace pyserve::PYSERVE_ISA {

// All but the last height's weights are multiplied while the next one's scores are softened.
inline constexpr int kTileAttentionRows = 6 * kTileHeight;

PYSERVE_INLINE void store(bf16* p, __m256bh v) { __builtin_memcpy(p, &v, sizeof v); }

// Of n floats; the others are zero.
PYSERVE_INLINE Vec load_some(const float* p, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}

inline void gather_tile_queries(const AttentionArgs& g, const AttentionTile& tile,
                                const TileRoom& room) {
  const int group = g.heads / g.layout.kv_heads, dim = g.layout.head_dim;
  for (int t = 0; t < tile.tokens; ++t)
    for (int h = 0; h < group; ++h) {
      const float* from =
          g.q + (tile.first_token + t) * g.ldq + (std::ptrdiff_t{tile.kv_head} * group + h) * dim;
      bf16* to = room.q + std::ptrdiff_t{t * group + h} * g.layout.key_depth;
      for (int i = 0; i < dim; i += kLanes)
        store(to + i, _mm512_cvtneps_pbh(load_some(from + i, dim - i < kLanes ? dim - i : kLanes)));
    }
}

// The tile against the keys of one span. Calls done(row, count, height) when values, and top and
// mass of the height, are those of the rows.
template <typename Done>
PYSERVE_INLINE void attend_tile_span(const Pages& pages, const TileRoom& room, int rows,
                                     const Span& span, Arrivals& arrivals, Done&& done) {
  const KvLayout& l = pages.g.layout;
  const int group = pages.g.heads / l.kv_heads, window = pages.g.window;
  const auto position_of = [&](int row) { return pages.tile.first_position + row / group; };
  const auto count_of = [&](int row) {
    return rows - row < kTileHeight ? rows - row : kTileHeight;
  };
  locate(pages, room, span);
  compiler_fence();
  std::optional<Weighing> before;
  const auto finish = [&](int row) {
    before->finish();
    done(row, count_of(row), room.heights[row / kTileHeight % 2]);
    before.reset();
  };
  for (int row = 0; row < rows; row += kTileHeight) {
    const int count = count_of(row), seen = position_of(row + count - 1) + 1;
    const Height& height = room.heights[row / kTileHeight % 2];
    if (seen <= span.begin) {
      for (int r = 0; r < count; ++r) height.mass[r] = 0.0f;
      done(row, count, height);
      continue;
    }
    const Sixteens s(l, span, span.begin, seen < span.end ? seen : span.end);
    score_height(l, room, room.q + std::ptrdiff_t{row} * l.key_depth, s, height.scores, arrivals);
    for (int r = 0; r < count; ++r) {
      const int position = position_of(row + r), lowest = window > 0 ? position - window + 1 : 0;
      const int steps = before ? (before->steps() + count - r - 1) / (count - r) : 0;
      soften_tile_row(l, height.scores + r * kLanes, s.first, s.last, span,
                      lowest > span.begin ? lowest : span.begin,
                      position + 1 < span.end ? position + 1 : span.end, height.top[r],
                      height.mass[r], before ? &*before : nullptr, steps, arrivals);
    }
    compiler_fence();
    if (before) finish(row - kTileHeight);
    before.emplace(l, room, height.scores, s, arrivals);
  }
  if (before) finish((rows - 1) / kTileHeight * kTileHeight);
}

// merge_row of so many rows, whose factors are computed together.
inline void merge_height(const KvLayout& l, const TileRoom& room, int row, int count,
                         const Height& height) {
  const Workspace& w = room.w;
  const Vec tops = load(w.top + row), span_tops = load(height.top), top = max(tops, span_tops);
  float before[kLanes], now[kLanes];
  store(before, exp(tops - top));
  store(now, exp(span_tops - top));
  for (int r = 0; r < count; ++r) {
    if (height.mass[r] == 0.0f) continue;
    const float* values = room.values + std::ptrdiff_t{r} * l.value_stride;
    float* merged = w.merged + std::ptrdiff_t{row + r} * l.value_stride;
    float& mass = w.mass[row + r];
    if (mass == 0.0f) {
      for (int i = 0; i < l.value_stride; i += kLanes) store(merged + i, load(values + i));
      w.top[row + r] = height.top[r];
      mass = height.mass[r];
      continue;
    }
    for (int i = 0; i < l.value_stride; i += kLanes)
      store(merged + i, fma(load(merged + i), splat(before[r]), load(values + i) * splat(now[r])));
    w.top[row + r] = top[r];
    mass = mass * before[r] + height.mass[r] * now[r];
  }
}

// Scratch that attention_tiles and merge_spans take; of the other types, that of attention.
inline std::size_t amx_scratch_floats(const KvLayout& l, int rows) {
  const std::size_t floats = attention_scratch_floats(l, rows);
  if (l.type != KvType::bfloat16) return floats;
  const std::size_t tiles = tile_scratch_floats(l, rows);
  return tiles > floats ? tiles : floats;
}

inline TileRoom tile_room(const KvLayout& l, int rows, float* scratch) {
  return carve_tiles(l, rows, [&](std::ptrdiff_t floats) {
    float* at = scratch;
    scratch += floats;
    return at;
  });
}

inline void attention_tiles(const AttentionArgs& g, const AttentionTile& tile, float* scratch) {
  const KvLayout& l = g.layout;
  const int rows = tile.tokens * (g.heads / l.kv_heads);
  const TileRoom room = tile_room(l, rows, scratch);
  const TileScope scope(attention_shapes(rows < kTileHeight ? rows : kTileHeight));
  gather_tile_queries(g, tile, room);
  for (int r = 0; r < rows; ++r) room.w.mass[r] = 0.0f;
  const int spans = (tile.first_position + tile.tokens - 1) / attention_span_keys(l) + 1;
  for (int s = 0; s < spans; ++s) {
    const Span span = span_of(g, tile, s);
    if (span.begin >= span.end) continue;
    // Few rows wait for memory all the time; many come back to the same keys again and again.
    const AttentionTile* next = s + 1 < spans ? &tile : tile.next;
    const Pages now{g, tile}, upcoming{g, next != nullptr ? *next : tile};
    Arrivals arrivals;
    if (rows <= kTileHeight) {
      arrivals = Arrivals(now, span);
      if (next != nullptr) arrivals.then(upcoming, span_of(g, *next, next == &tile ? s + 1 : 0));
    }
    attend_tile_span(now, room, rows, span, arrivals,
                     [&](int row, int count, const Height& height) {
                       merge_height(l, room, row, count, height);
                     });
  }
  scatter_outputs(g, tile, room.w);
}

inline void attention_tiles_span(const AttentionArgs& g, const AttentionTile& tile, int index,
                                 float* scratch, float* partial) {
  const KvLayout& l = g.layout;
  const int rows = tile.tokens * (g.heads / l.kv_heads);
  float* tops = partial + std::ptrdiff_t{rows} * l.value_stride;
  float* masses = tops + rows;
  const Span span = span_of(g, tile, index);
  if (span.begin >= span.end) {
    for (int r = 0; r < rows; ++r) masses[r] = 0.0f;
    return;
  }
  const TileRoom room = tile_room(l, rows, scratch);
  const TileScope scope(attention_shapes(rows < kTileHeight ? rows : kTileHeight));
  gather_tile_queries(g, tile, room);
  const Pages now{g, tile};
  Arrivals arrivals;
  if (rows <= kTileHeight) arrivals = Arrivals(now, span);
  attend_tile_span(now, room, rows, span, arrivals, [&](int row, int count, const Height& height) {
    const std::ptrdiff_t floats = std::ptrdiff_t{count} * l.value_stride;
    __builtin_memcpy(partial + std::ptrdiff_t{row} * l.value_stride, room.values,
                     sizeof(float) * floats);
    __builtin_memcpy(tops + row, height.top, sizeof(float) * count);
    __builtin_memcpy(masses + row, height.mass, sizeof(float) * count);
  });
}

// Pairs of a key's elements, and values to their place in pairs of keys (see KvLayout).
inline void write_tile_kv(const KvLayout& l, std::byte* pages, int offset, const float* key,
                          const float* value) {
  const __m256i strides = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                             _mm256_set1_epi32(l.key_stride));
  const bool odd = offset % 2 != 0;
  for (int head = 0; head < l.kv_heads; ++head, key += l.head_dim, value += l.head_dim) {
    std::byte* page = pages + head * l.page_bytes;
    std::byte* keys = page + 4 * std::ptrdiff_t{offset};
    std::byte* values = page + l.values + 4 * std::ptrdiff_t{offset / 2} * l.value_stride;
    for (int i = 0; i < l.head_dim; i += kLanes) {
      const int n = l.head_dim - i < kLanes ? l.head_dim - i : kLanes;
      const auto pairs = (__m256i)_mm512_cvtneps_pbh(load_some(key + i, n));
      _mm256_mask_i32scatter_epi32(keys + i / 2 * std::ptrdiff_t{4} * l.key_stride,
                                   static_cast<__mmask8>((1 << (n + 1) / 2) - 1), strides, pairs,
                                   4);
      const __m512i wide =
          _mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)_mm512_cvtneps_pbh(load_some(value + i, n)));
      // Only this key's half of each pair is written: the other's may be, by another thread.
      const __mmask32 halves = (odd ? 0xAAAAAAAAu : 0x55555555u) & (~0u >> (32 - 2 * n));
      _mm512_mask_storeu_epi16(values + 4 * std::ptrdiff_t{i}, halves,
                               odd ? _mm512_maskz_slli_epi32(0xFFFF, wide, 16) : wide);
    }
  }
}

inline void set_tile_attention(Kernels& kernels) {
  constexpr int kBf16 = static_cast<int>(KvType::bfloat16);
  kernels.kv_tiles = true;
  kernels.attention_rows[kBf16] = kTileAttentionRows;
  kernels.write_kv[kBf16] = write_tile_kv;
  kernels.attention[kBf16] = attention_tiles;
  kernels.attention_span[kBf16] = attention_tiles_span;
  kernels.attention_scratch_floats = amx_scratch_floats;
}

}  // namespace pyserve::PYSERVE_ISA
