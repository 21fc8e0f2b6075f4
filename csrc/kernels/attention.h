// Causal attention of a few query tokens of one sequence over its paged keys and values, all query
// heads of one kv head together. Included by isa_*.cpp only.
//
// Keys are taken in spans that start at fixed positions (multiples of kSpanKeys); inside a span
// scores are softened against the span's own maximum, and spans are merged in ascending order
// (Flash-Decoding's split with fixed points). A row's bits depend on its visible keys only: keys
// that other rows of the tile see besides count with weight exactly 0. Who computes a span does not
// matter, so those of a long sequence can be shared out to threads.
#pragma once

#include "kernels/attention_tiles.h"
#include "kernels/kv_write.h"

namespace pyserve::PYSERVE_ISA {

inline constexpr int kSpanKeys = 512;
// Query rows of an item: enough to fill register tiles, few enough that their scores stay in the
// second-level cache.
inline constexpr int kAttentionRows = 48;

// Keys of a span: whole blocks.
inline int attention_span_keys(const KvLayout& l) {
  return kSpanKeys > l.block_size ? kSpanKeys / l.block_size * l.block_size : l.block_size;
}

inline std::size_t attention_partial_floats(const KvLayout& l, int rows) {
  return std::size_t(rows) * (l.value_stride + 2);
}

inline std::ptrdiff_t score_stride(const KvLayout& l) {
  // A little more than the slots: rows do not fall into one cache set.
  return std::ptrdiff_t{attention_span_keys(l) / l.block_size} * l.key_stride + 16;
}

inline std::size_t attention_scratch_floats(const KvLayout& l, int rows) {
  return rows * std::size_t(score_stride(l) + 2 * l.value_stride + l.key_depth * 5 / 4 + 7);
}

inline Workspace carve(const KvLayout& l, int rows, float* scratch) {
  Workspace w;
  const auto take = [&scratch, rows](std::ptrdiff_t width) {
    float* at = scratch;
    scratch += rows * width;
    return at;
  };
  w.score_stride = score_stride(l);
  w.depth = l.key_depth;
  w.scores = take(w.score_stride);
  w.values = take(l.value_stride);
  w.merged = take(l.value_stride);
  w.q = take(w.depth);
  w.q_bytes = reinterpret_cast<std::int8_t*>(take(w.depth / 4));
  w.q_sum = reinterpret_cast<std::int32_t*>(take(1));
  w.q_scale = take(1);
  w.top = take(1);
  w.mass = take(1);
  w.span_top = take(1);
  w.span_mass = take(1);
  return w;
}

// Calls f(row, count, end) for every group of rows that make one register tile, end the position
// after the last key that the group sees in the span.
template <typename F>
PYSERVE_INLINE void for_row_groups(const AttentionTile& tile, int group, int rows, const Span& span,
                                   F&& f) {
  for (int row = 0; row < rows;) {
    const int count = next_tile_rows(rows - row);
    const int seen = tile.first_position + (row + count - 1) / group + 1;
    f(row, count, seen < span.end ? seen : span.end);
    row += count;
  }
}

template <typename T>
inline void score_span(const Pages& pages, const Workspace& w, int rows, const Span& span) {
  const KvLayout& l = pages.g.layout;
  const int per_block = l.key_stride / kLanes, group = pages.g.heads / l.kv_heads;
  const auto vector_of = [&](int position) {
    return position / l.block_size * per_block + position % l.block_size / kLanes -
           span.first_block * per_block;
  };
  const int first = vector_of(span.begin), last = vector_of(span.end - 1) + 1;
  // Several groups of rows: a few keys, which stay in the first-level cache, at a time.
  const int piece = rows > kTileRows ? 2 : last - first;
  for (int v = first; v < last; v += piece)
    for_row_groups(pages.tile, group, rows, span, [&](int row, int count, int seen) {
      if (seen <= span.begin) return;
      int end = vector_of(seen - 1) + 1;
      if (v + piece < end) end = v + piece;
      if (v >= end) return;
      with_rows(count, [&]<int Rows>() { score_rows<T, Rows>(pages, w, row, span, v, end); });
    });
}

// Turns a row's scores into weights e^(s - max); invisible keys get 0. Sets span_top and span_mass.
// The weights of int8 values are multiplied by their scales.
template <typename T>
inline void soften_row(const Pages& pages, const Workspace& w, int row, const Span& span, int end) {
  constexpr float kHidden = -__builtin_inff();
  const KvLayout& l = pages.g.layout;
  float* scores = w.scores + row * w.score_stride;
  const int position = pages.tile.first_position + row / (pages.g.heads / l.kv_heads);
  const int lowest = pages.g.window > 0 ? position - pages.g.window + 1 : 0;
  const int visible_begin = lowest > span.begin ? lowest : span.begin;
  const int visible_end = position + 1 < end ? position + 1 : end;
  const int begin_block = span.begin / l.block_size, last_block = (end - 1) / l.block_size;
  for (int block = begin_block; block <= last_block; ++block) {
    const int start = block * l.block_size;
    if (start >= visible_begin && start + l.key_stride <= visible_end &&
        l.key_stride == l.block_size)
      continue;
    float* at = scores + std::ptrdiff_t{block - span.first_block} * l.key_stride;
    for (int i = 0; i < l.block_size && start + i < visible_begin; ++i) at[i] = kHidden;
    const int seen = visible_end > start ? visible_end - start : 0;
    for (int i = seen < l.block_size ? seen : l.block_size; i < l.key_stride; ++i) at[i] = kHidden;
  }
  const int slot_begin = (begin_block - span.first_block) * l.key_stride;
  const int slot_end = (last_block + 1 - span.first_block) * l.key_stride;
  Vec highest = splat(kHidden);
  for (int i = slot_begin; i < slot_end; i += kLanes) highest = max(load(scores + i), highest);
  const float top = max_lanes(highest);
  // All hidden: e^(-inf - 0) is 0 everywhere, where e^(-inf + inf) would be NaN.
  const Vec shift = splat(top == kHidden ? 0.0f : top);
  Vec sum = {};
  for (int i = slot_begin; i < slot_end; i += kLanes) {
    Vec weight = exp(load(scores + i) - shift);
    sum += weight;
    if constexpr (kQuantized<T>) {
      const std::byte* page = pages.of(span.first_block + i / l.key_stride);
      weight =
          weight * load(reinterpret_cast<const float*>(page + l.value_scales) + i % l.key_stride);
    }
    store(scores + i, weight);
  }
  w.span_top[row] = top;
  w.span_mass[row] = sum_lanes(sum);
}

// The tile against the keys of one span: fills values, span_top and span_mass of every row.
template <typename T>
inline void attend_span(const Pages& pages, const Workspace& w, int rows, const Span& span) {
  const KvLayout& l = pages.g.layout;
  const int group = pages.g.heads / l.kv_heads;
  score_span<T>(pages, w, rows, span);
  for_row_groups(pages.tile, group, rows, span, [&](int row, int count, int seen) {
    if (seen <= span.begin) {
      for (int r = row; r < row + count; ++r) w.span_mass[r] = 0.0f;
      return;
    }
    for (int r = row; r < row + count; ++r) soften_row<T>(pages, w, r, span, seen);
    with_rows(count, [&]<int Rows>() { weigh_rows<T, Rows>(pages, w, row, span, seen); });
  });
}

// Joins a span's result of a row to those of the spans before it.
inline void merge_row(const KvLayout& l, const Workspace& w, int row, const float* values,
                      float span_top, float span_mass) {
  float* merged = w.merged + std::ptrdiff_t{row} * l.value_stride;
  if (span_mass == 0.0f) return;  // nothing of this span is visible to the row
  if (w.mass[row] == 0.0f) {
    for (int i = 0; i < l.value_stride; ++i) merged[i] = values[i];
    w.top[row] = span_top;
    w.mass[row] = span_mass;
    return;
  }
  const float top = w.top[row] > span_top ? w.top[row] : span_top;
  const Vec before = exp(splat(w.top[row] - top)), now = exp(splat(span_top - top));
  for (int i = 0; i < l.value_stride; i += kLanes)
    store(merged + i, fma(load(merged + i), before, load(values + i) * now));
  w.mass[row] = w.mass[row] * before[0] + span_mass * now[0];
  w.top[row] = top;
}

template <typename T>
inline void gather_queries(const AttentionArgs& g, const AttentionTile& tile, const Workspace& w) {
  const int group = g.heads / g.layout.kv_heads, dim = g.layout.head_dim;
  for (int t = 0; t < tile.tokens; ++t)
    for (int h = 0; h < group; ++h) {
      const int row = t * group + h;
      const float* from =
          g.q + (tile.first_token + t) * g.ldq + (std::ptrdiff_t{tile.kv_head} * group + h) * dim;
      float* q = w.q + std::ptrdiff_t{row} * w.depth;
      if constexpr (kQuantized<T>) {
        w.q_scale[row] = quantize_head(from, dim, q);
        for (int i = dim; i < w.depth; ++i) q[i] = 0.0f;
        std::int8_t* bytes = w.q_bytes + std::ptrdiff_t{row} * w.depth;
        std::int32_t sum = 0;
        for (int i = 0; i < w.depth; ++i) {
          bytes[i] = static_cast<std::int8_t>(static_cast<int>(q[i]));
          sum += bytes[i];
        }
        w.q_sum[row] = sum;
      } else {
        __builtin_memcpy(q, from, sizeof(float) * dim);
        for (int i = dim; i < w.depth; ++i) q[i] = 0.0f;
      }
    }
}

inline void scatter_outputs(const AttentionArgs& g, const AttentionTile& tile, const Workspace& w) {
  const int group = g.heads / g.layout.kv_heads, dim = g.layout.head_dim;
  for (int t = 0; t < tile.tokens; ++t)
    for (int h = 0; h < group; ++h) {
      const int row = t * group + h;
      float* to =
          g.out + (tile.first_token + t) * g.ldo + (std::ptrdiff_t{tile.kv_head} * group + h) * dim;
      const float* from = w.merged + std::ptrdiff_t{row} * g.layout.value_stride;
      const float scale = 1.0f / w.mass[row];
      for (int i = 0; i < dim; ++i) to[i] = from[i] * scale;
    }
}

// The positions of span number `index` that some row of the tile sees; none: begin >= end.
inline Span span_of(const AttentionArgs& g, const AttentionTile& tile, int index) {
  const int keys = attention_span_keys(g.layout);
  const int lowest = g.window > 0 ? tile.first_position - g.window + 1 : 0;
  const int begin = index * keys, end = tile.first_position + tile.tokens;
  return {begin / g.layout.block_size, lowest > begin ? lowest : begin,
          end < begin + keys ? end : begin + keys};
}

template <typename T>
void attention(const AttentionArgs& g, const AttentionTile& tile, float* scratch) {
  const int rows = tile.tokens * (g.heads / g.layout.kv_heads);
  const Workspace w = carve(g.layout, rows, scratch);
  const Pages pages = {g, tile};
  gather_queries<T>(g, tile, w);
  for (int r = 0; r < rows; ++r) w.mass[r] = 0.0f;
  const int spans = (tile.first_position + tile.tokens - 1) / attention_span_keys(g.layout) + 1;
  for (int s = 0; s < spans; ++s) {
    const Span span = span_of(g, tile, s);
    if (span.begin >= span.end) continue;
    attend_span<T>(pages, w, rows, span);
    for (int r = 0; r < rows; ++r)
      merge_row(g.layout, w, r, w.values + std::ptrdiff_t{r} * g.layout.value_stride, w.span_top[r],
                w.span_mass[r]);
  }
  scatter_outputs(g, tile, w);
}

// `partial` is [rows, value_stride] of values, then [rows] of maxima and of masses.
template <typename T>
void attention_span(const AttentionArgs& g, const AttentionTile& tile, int index, float* scratch,
                    float* partial) {
  const int rows = tile.tokens * (g.heads / g.layout.kv_heads);
  Workspace w = carve(g.layout, rows, scratch);
  w.values = partial;
  w.span_top = partial + std::ptrdiff_t{rows} * g.layout.value_stride;
  w.span_mass = w.span_top + rows;
  const Span span = span_of(g, tile, index);
  if (span.begin >= span.end) {
    for (int r = 0; r < rows; ++r) w.span_mass[r] = 0.0f;
    return;
  }
  gather_queries<T>(g, tile, w);
  attend_span<T>({g, tile}, w, rows, span);
}

inline void merge_spans(const AttentionArgs& g, const AttentionTile& tile, int spans,
                        const float* partials, float* scratch) {
  const KvLayout& l = g.layout;
  const int rows = tile.tokens * (g.heads / l.kv_heads);
  const Workspace w = carve(l, rows, scratch);
  for (int r = 0; r < rows; ++r) w.mass[r] = 0.0f;
  for (int s = 0; s < spans; ++s, partials += attention_partial_floats(l, rows)) {
    const float* tops = partials + std::ptrdiff_t{rows} * l.value_stride;
    for (int r = 0; r < rows; ++r)
      merge_row(l, w, r, partials + std::ptrdiff_t{r} * l.value_stride, tops[r], tops[rows + r]);
  }
  scatter_outputs(g, tile, w);
}

inline void set_int8_attention(Kernels& kernels) {
  constexpr int kInt8 = static_cast<int>(KvType::int8);
  kernels.attention[kInt8] = attention<std::int8_t>;
  kernels.attention_span[kInt8] = attention_span<std::int8_t>;
}

}  // namespace pyserve::PYSERVE_ISA
