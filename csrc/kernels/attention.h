// Causal attention of a few query tokens of one sequence over its paged keys and values, all query
// heads of one kv head together. Included by isa_*.cpp only.
//
// Keys are taken in spans that start at fixed positions (multiples of kSpanKeys); inside a span
// scores are softened against the span's own maximum, and spans are merged in ascending order
// (Flash-Decoding's split with fixed points). A row's bits depend on its visible keys only: keys
// that other rows of the tile see besides count with weight exactly 0.
#pragma once

namespace pyserve::PYSERVE_ISA {

inline constexpr int kSpanKeys = 512;

struct SpanShape {
  int blocks;  // KV blocks in a span
  int keys;    // positions in a span
  int slots;   // floats of one row of scores: keys, with every block padded to key_stride
};

inline SpanShape span_shape(const AttentionArgs& g) {
  const int blocks = kSpanKeys > g.block_size ? kSpanKeys / g.block_size : 1;
  return {blocks, blocks * g.block_size, blocks * g.key_stride};
}

// Views into the caller's scratch: everything one tile needs.
struct Workspace {
  float* q;        // [rows, head_dim]
  float* scores;   // [rows, span slots]
  float* partial;  // [rows, value_stride] of the current span
  float* merged;   // [rows, value_stride] of the spans before
  float* top;      // [rows] maximum of the spans before
  float* mass;     // [rows] sum of weights of the spans before, relative to top
  float* span_top;
  float* span_mass;
};

inline std::size_t attention_scratch_floats(const AttentionArgs& g, int max_tile_tokens) {
  const std::size_t rows = static_cast<std::size_t>(max_tile_tokens) * (g.heads / g.kv_heads);
  return rows * (g.head_dim + span_shape(g).slots + 2 * g.value_stride + 4);
}

inline Workspace carve(const AttentionArgs& g, int rows, float* scratch) {
  Workspace w;
  const auto take = [&scratch, rows](std::ptrdiff_t width) {
    float* at = scratch;
    scratch += rows * width;
    return at;
  };
  w.scores = take(span_shape(g).slots);
  w.partial = take(g.value_stride);
  w.merged = take(g.value_stride);
  w.q = take(g.head_dim);
  w.top = take(1);
  w.mass = take(1);
  w.span_top = take(1);
  w.span_mass = take(1);
  return w;
}

// Positions [begin, end) of one span, that some row of the tile sees.
struct SpanRange {
  int first_block;  // of the span, index into the sequence's block table
  int begin;
  int end;
};

template <int Vectors, typename T>
inline void score_vectors(const Workspace& w, const T* const (&keys)[Vectors],
                          const int (&slots)[Vectors], int rows, const AttentionArgs& g) {
  const std::ptrdiff_t width = span_shape(g).slots;
  for (int row = 0; row < rows;) {
    const int count = next_tile_rows(rows - row);
    with_rows(count, [&]<int Rows>() {
      Vec acc[Rows][Vectors] = {};
      accumulate<Rows, Vectors, T>(acc, w.q + row * g.head_dim, g.head_dim, keys, g.key_stride,
                                   g.head_dim);
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) store(w.scores + (row + r) * width + slots[v], acc[r][v]);
    });
    row += count;
  }
}

template <typename T>
inline void score_span(const AttentionArgs& g, const AttentionTile& tile, const Workspace& w,
                       int rows, const SpanRange& range) {
  const std::ptrdiff_t block_floats = std::ptrdiff_t{g.head_dim} * g.key_stride;
  const int per_block = g.key_stride / kLanes;
  const int first = range.begin / g.block_size * per_block;
  const int end = ((range.end - 1) / g.block_size + 1) * per_block;
  const auto keys_of = [&](int vector) {
    const std::ptrdiff_t block = tile.blocks[vector / per_block];
    return static_cast<const T*>(g.keys) + (block * g.kv_heads + tile.kv_head) * block_floats +
           vector % per_block * kLanes;
  };
  const auto slot_of = [&](int vector) {
    return (vector - range.first_block * per_block) * kLanes;
  };
  int v = first;
  for (; v + 2 <= end; v += 2)
    score_vectors<2, T>(w, {keys_of(v), keys_of(v + 1)}, {slot_of(v), slot_of(v + 1)}, rows, g);
  if (v < end) score_vectors<1, T>(w, {keys_of(v)}, {slot_of(v)}, rows, g);
}

// Turns a row's scores into weights e^(s - max); invisible keys get 0. Sets span_top and span_mass.
inline void soften_row(const AttentionArgs& g, float* scores, int position, const SpanRange& range,
                       float& top, float& mass) {
  constexpr float kHidden = -__builtin_inff();
  const int visible_begin =
      g.window > 0 && position - g.window + 1 > range.begin ? position - g.window + 1 : range.begin;
  const int visible_end = position + 1 < range.end ? position + 1 : range.end;
  const int last_block = (range.end - 1) / g.block_size;
  const int begin_block = range.begin / g.block_size;
  for (int block = begin_block; block <= last_block; ++block) {
    const int start = block * g.block_size;
    float* at = scores + std::ptrdiff_t{block - range.first_block} * g.key_stride;
    for (int i = 0; i < g.block_size && start + i < visible_begin; ++i) at[i] = kHidden;
    const int seen = visible_end > start ? visible_end - start : 0;
    for (int i = seen < g.block_size ? seen : g.block_size; i < g.key_stride; ++i) at[i] = kHidden;
  }
  const int slot_begin = (begin_block - range.first_block) * g.key_stride;
  const int slot_end = (last_block + 1 - range.first_block) * g.key_stride;
  Vec highest = splat(kHidden);
  for (int i = slot_begin; i < slot_end; i += kLanes) highest = max(load(scores + i), highest);
  top = max_lanes(highest);
  // All hidden: e^(-inf - 0) is 0 everywhere, where e^(-inf + inf) would be NaN.
  const Vec shift = splat(top == kHidden ? 0.0f : top);
  Vec sum = {};
  for (int i = slot_begin; i < slot_end; i += kLanes) {
    const Vec weight = exp(load(scores + i) - shift);
    store(scores + i, weight);
    sum += weight;
  }
  mass = sum_lanes(sum);
}

template <int Vectors, typename T>
inline void weigh_values(const AttentionArgs& g, const AttentionTile& tile, const Workspace& w,
                         int rows, const SpanRange& range, int element) {
  const std::ptrdiff_t width = span_shape(g).slots;
  const std::ptrdiff_t block_floats = std::ptrdiff_t{g.block_size} * g.value_stride;
  for (int row = 0; row < rows;) {
    const int count = next_tile_rows(rows - row);
    with_rows(count, [&]<int Rows>() {
      Vec acc[Rows][Vectors] = {};
      for (int key = range.begin; key < range.end;) {
        const int block = key / g.block_size, offset = key % g.block_size;
        const int left = range.end - key;
        const int keys = left < g.block_size - offset ? left : g.block_size - offset;
        const std::ptrdiff_t page = std::ptrdiff_t{tile.blocks[block]} * g.kv_heads + tile.kv_head;
        const T* from = static_cast<const T*>(g.values) + page * block_floats +
                        std::ptrdiff_t{offset} * g.value_stride + element;
        const T* values[Vectors];
        for (int v = 0; v < Vectors; ++v) values[v] = from + v * kLanes;
        const float* weights =
            w.scores + row * width + (block - range.first_block) * g.key_stride + offset;
        accumulate<Rows, Vectors, T>(acc, weights, width, values, g.value_stride, keys);
        key += keys;
      }
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v)
          store(w.partial + (row + r) * g.value_stride + element + v * kLanes, acc[r][v]);
    });
    row += count;
  }
}

// Joins the current span's result of a row to those before it.
inline void merge_row(const AttentionArgs& g, const Workspace& w, int row) {
  float* merged = w.merged + std::ptrdiff_t{row} * g.value_stride;
  const float* partial = w.partial + std::ptrdiff_t{row} * g.value_stride;
  if (w.span_mass[row] == 0.0f) return;  // nothing of this span is visible to the row
  if (w.mass[row] == 0.0f) {
    for (int i = 0; i < g.value_stride; ++i) merged[i] = partial[i];
    w.top[row] = w.span_top[row];
    w.mass[row] = w.span_mass[row];
    return;
  }
  const float top = w.top[row] > w.span_top[row] ? w.top[row] : w.span_top[row];
  const Vec before = exp(splat(w.top[row] - top)), now = exp(splat(w.span_top[row] - top));
  for (int i = 0; i < g.value_stride; i += kLanes)
    store(merged + i, fma(load(merged + i), before, load(partial + i) * now));
  w.mass[row] = w.mass[row] * before[0] + w.span_mass[row] * now[0];
  w.top[row] = top;
}

inline void gather_queries(const AttentionArgs& g, const AttentionTile& tile, const Workspace& w) {
  const int group = g.heads / g.kv_heads;
  for (int t = 0; t < tile.tokens; ++t) {
    const float* from =
        g.q + (tile.first_token + t) * g.ldq + std::ptrdiff_t{tile.kv_head} * group * g.head_dim;
    __builtin_memcpy(w.q + std::ptrdiff_t{t} * group * g.head_dim, from,
                     sizeof(float) * group * g.head_dim);
  }
}

inline void scatter_outputs(const AttentionArgs& g, const AttentionTile& tile, const Workspace& w) {
  const int group = g.heads / g.kv_heads;
  for (int t = 0; t < tile.tokens; ++t)
    for (int h = 0; h < group; ++h) {
      const int row = t * group + h;
      float* to = g.out + (tile.first_token + t) * g.ldo +
                  (std::ptrdiff_t{tile.kv_head} * group + h) * g.head_dim;
      const float* from = w.merged + std::ptrdiff_t{row} * g.value_stride;
      const float scale = 1.0f / w.mass[row];
      for (int i = 0; i < g.head_dim; ++i) to[i] = from[i] * scale;
    }
}

template <typename T>
void attention(const AttentionArgs& g, const AttentionTile& tile, float* scratch) {
  const int group = g.heads / g.kv_heads, rows = tile.tokens * group;
  const SpanShape span = span_shape(g);
  const Workspace w = carve(g, rows, scratch);
  gather_queries(g, tile, w);
  for (int r = 0; r < rows; ++r) w.mass[r] = 0.0f;
  const int lowest = tile.first_position - g.window + 1;
  const int begin = g.window > 0 && lowest > 0 ? lowest : 0;
  const int end = tile.first_position + tile.tokens;
  for (int s = begin / span.keys; s * span.keys < end; ++s) {
    const SpanRange range = {s * span.blocks, begin > s * span.keys ? begin : s * span.keys,
                             end < (s + 1) * span.keys ? end : (s + 1) * span.keys};
    score_span<T>(g, tile, w, rows, range);
    for (int r = 0; r < rows; ++r)
      soften_row(g, w.scores + std::ptrdiff_t{r} * span.slots, tile.first_position + r / group,
                 range, w.span_top[r], w.span_mass[r]);
    int element = 0;
    for (; element + 2 * kLanes <= g.value_stride; element += 2 * kLanes)
      weigh_values<2, T>(g, tile, w, rows, range, element);
    if (element < g.value_stride) weigh_values<1, T>(g, tile, w, rows, range, element);
    for (int r = 0; r < rows; ++r) merge_row(g, w, r);
  }
  scatter_outputs(g, tile, w);
}

}  // namespace pyserve::PYSERVE_ISA
