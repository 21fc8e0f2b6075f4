// The register tiles of attention to bfloat16 keys and values: queries against keys, and weights
// against values. Included by attention_amx.h only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// Tiles 0 to 3 are sums; 4 times 5 takes 32 of depth, 6 times 7 takes 16.
inline constexpr int kSums = 4;

inline TileShapes attention_shapes(int rows) {
  TileShapes shapes = whole_tiles();
  for (int tile = 0; tile < kTiles; ++tile) shapes.rows[tile] = static_cast<std::uint8_t>(rows);
  shapes.rows[5] = kTileHeight;
  shapes.rows[7] = kTileHeight / 2;
  shapes.row_bytes[6] = kTileRowBytes / 2;
  return shapes;
}

// Slots of a span by sixteens, in pairs.
inline int span_sixteens(const KvLayout& l) {
  const int slots = attention_span_keys(l) / l.block_size * l.key_stride;
  return static_cast<int>(round_up(slots / kLanes, 2));
}

// Views into the caller's scratch. Sixteens are of keys that lie together. Of scores and values
// there is one height of rows.
struct TileRoom {
  Workspace w;    // merged, top, mass, span_top, span_mass
  bf16* q;        // [rows, depth]
  float* scores;  // [sixteens][kTileHeight][16]; then weights in their place, see soften
  float* values;  // [kTileHeight, value_stride]
  const std::byte** keys_at;  // of each sixteen
  const std::byte** values_at;
  std::byte* edge;  // values of sixteen keys of which some are not written yet: those are zero
};

template <typename Take>
inline TileRoom carve_tiles(const KvLayout& l, int rows, Take&& take) {
  TileRoom room;
  const std::ptrdiff_t height = round_up(rows, kTileHeight), sixteens = span_sixteens(l);
  room.scores = take(sixteens * kTileFloats);
  room.values = take(kTileHeight * l.value_stride);
  room.edge = reinterpret_cast<std::byte*>(take(kTileHeight / 2 * l.value_stride));
  room.w.merged = take(height * l.value_stride);
  room.w.top = take(height);
  room.w.mass = take(height);
  room.w.span_top = take(kTileHeight);
  room.w.span_mass = take(kTileHeight);
  room.w.depth = l.key_depth;
  room.q = reinterpret_cast<bf16*>(take(height * l.key_depth / 2));
  room.keys_at = reinterpret_cast<const std::byte**>(take(2 * sixteens));
  room.values_at = reinterpret_cast<const std::byte**>(take(2 * sixteens));
  return room;
}

inline std::size_t tile_scratch_floats(const KvLayout& l, int rows) {
  std::ptrdiff_t floats = 0;
  carve_tiles(l, rows, [&](std::ptrdiff_t n) -> float* {
    floats += n;
    return nullptr;
  });
  return floats;
}

// Values of sixteen keys of which the first `written` are there.
inline void copy_edge(const KvLayout& l, const std::byte* values, int written, std::byte* edge) {
  for (int pair = 0; pair < kTileHeight / 2; ++pair) {
    const int there = written - 2 * pair;
    const WordVec mask = WordVec{} + (there >= 2 ? ~0u : there == 1 ? 0xFFFFu : 0u);
    for (int i = 0; i < l.value_stride; i += kLanes) {
      const std::ptrdiff_t at = 4 * (std::ptrdiff_t{pair} * l.value_stride + i);
      WordVec words;
      __builtin_memcpy(&words, values + at, sizeof words);
      words &= mask;
      __builtin_memcpy(edge + at, &words, sizeof words);
    }
  }
}

// The sixteens, counted from the span's first, that positions [begin, end) lie in.
struct Sixteens {
  int first;
  int last;  // one behind

  Sixteens(const KvLayout& l, const Span& span, int begin, int end) {
    const auto of = [&](int position) {
      return (position / l.block_size - span.first_block) * (l.key_stride / kLanes) +
             position % l.block_size / kLanes;
    };
    first = of(begin);
    last = of(end - 1) + 1;
  }
};

// Finds the span's keys and values.
inline void locate(const Pages& pages, const TileRoom& room, const Span& span) {
  const KvLayout& l = pages.g.layout;
  const Sixteens s(l, span, span.begin, span.end);
  const int per_block = l.key_stride / kLanes;
  for (int v = s.first / per_block * per_block; v < s.last; v += per_block) {
    const std::byte* page = pages.of(span.first_block + v / per_block);
    for (int i = 0; i < per_block; ++i) {
      room.keys_at[v + i] = page + i * kTileRowBytes;
      room.values_at[v + i] = page + l.values + i * (kTileHeight / 2 * 4) * l.value_stride;
    }
  }
  const int written = (span.end - 1) % l.block_size % kLanes + 1;
  if (written == kLanes) return;
  const std::byte*& last = room.values_at[s.last - 1];
  copy_edge(l, last, written, room.edge);
  last = room.edge;
}

// Scores of `Count` sixteens of keys. Keys and values pass by the first-level cache, which the
// scores need for themselves.
template <int Count>
PYSERVE_INLINE void score_tiles(const KvLayout& l, const bf16* q, const std::byte* const* keys_at,
                                float* scores) {
  const std::ptrdiff_t step = l.key_stride * 4, q_step = l.key_depth * 2;
  _tile_zero(0);
  if constexpr (Count > 1) _tile_zero(1);
  if constexpr (Count > 2) _tile_zero(2);
  if constexpr (Count > 3) _tile_zero(3);
  int p = 0;
  for (; p + 32 <= l.key_depth; p += 32) {
    const std::ptrdiff_t at = p / 2 * step;
    _tile_loadd(4, q + p, q_step);
    _tile_stream_loadd(5, keys_at[0] + at, step);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (Count > 1) {
      _tile_stream_loadd(5, keys_at[1] + at, step);
      _tile_dpbf16ps(1, 4, 5);
    }
    if constexpr (Count > 2) {
      _tile_stream_loadd(5, keys_at[2] + at, step);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (Count > 3) {
      _tile_stream_loadd(5, keys_at[3] + at, step);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  if (p < l.key_depth) {
    const std::ptrdiff_t at = p / 2 * step;
    _tile_loadd(6, q + p, q_step);
    _tile_stream_loadd(7, keys_at[0] + at, step);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (Count > 1) {
      _tile_stream_loadd(7, keys_at[1] + at, step);
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (Count > 2) {
      _tile_stream_loadd(7, keys_at[2] + at, step);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (Count > 3) {
      _tile_stream_loadd(7, keys_at[3] + at, step);
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  _tile_stored(0, scores, kTileRowBytes);
  if constexpr (Count > 1) _tile_stored(1, scores + 1 * kTileFloats, kTileRowBytes);
  if constexpr (Count > 2) _tile_stored(2, scores + 2 * kTileFloats, kTileRowBytes);
  if constexpr (Count > 3) _tile_stored(3, scores + 3 * kTileFloats, kTileRowBytes);
}

// Sums of weights times values over the sixteens [first, last), of 16 Count elements.
template <int Count>
PYSERVE_INLINE void weigh_tiles(const KvLayout& l, const TileRoom& room, int first, int last,
                                int element) {
  const std::ptrdiff_t step = l.value_stride * 4;
  _tile_zero(0);
  if constexpr (Count > 1) _tile_zero(1);
  if constexpr (Count > 2) _tile_zero(2);
  if constexpr (Count > 3) _tile_zero(3);
  for (int v = first; v < last; ++v) {
    const std::byte* values = room.values_at[v] + element * 4;
    // A pair's weights lie side by side in the first one's place.
    _tile_loadd(6, room.scores + v / 2 * 2 * kTileFloats + v % 2 * (kLanes / 2), kTileRowBytes);
    _tile_stream_loadd(7, values, step);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (Count > 1) {
      _tile_stream_loadd(7, values + 1 * kTileRowBytes, step);
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (Count > 2) {
      _tile_stream_loadd(7, values + 2 * kTileRowBytes, step);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (Count > 3) {
      _tile_stream_loadd(7, values + 3 * kTileRowBytes, step);
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  float* to = room.values + element;
  _tile_stored(0, to, step);
  if constexpr (Count > 1) _tile_stored(1, to + 1 * kLanes, step);
  if constexpr (Count > 2) _tile_stored(2, to + 2 * kLanes, step);
  if constexpr (Count > 3) _tile_stored(3, to + 3 * kLanes, step);
}

}  // namespace pyserve::PYSERVE_ISA
