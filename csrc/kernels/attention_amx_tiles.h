// The register tiles of attention to bfloat16 keys and values: queries against keys, and weights
// against values. Included by attention_amx.h only.
#pragma once

#include "kernels/amx_tile.h"

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

// One height of rows against one span.
struct Height {
  float* scores;  // [sixteens][kTileHeight][16]; then weights, see soften_tile_row
  float* top;     // [kTileHeight] greatest score
  float* mass;    // [kTileHeight] sum of weights
};

// Views into the caller's scratch. A sixteen is of keys, which lie together in a block.
struct TileRoom {
  Workspace w;                // merged, top, mass
  bf16* q;                    // [rows, depth]
  Height heights[2];          // one's scores are softened while the other's weights are multiplied
  float* values;              // [kTileHeight, value_stride]
  const std::byte** keys_at;  // of each sixteen
  const std::byte** values_at;
  std::byte* edge;  // values of sixteen keys of which some are not written yet: those are zero
};

template <typename Take>
inline TileRoom carve_tiles(const KvLayout& l, int rows, Take&& take) {
  TileRoom room;
  const std::ptrdiff_t all_rows = round_up(rows, kTileHeight), sixteens = span_sixteens(l);
  for (Height& height : room.heights) {
    height.scores = take(sixteens * kTileFloats);
    height.top = take(kTileHeight);
    height.mass = take(kTileHeight);
  }
  room.values = take(kTileHeight * l.value_stride);
  room.edge = reinterpret_cast<std::byte*>(take(kTileHeight / 2 * l.value_stride));
  room.w.merged = take(all_rows * l.value_stride);
  room.w.top = take(all_rows);
  room.w.mass = take(all_rows);
  room.q = reinterpret_cast<bf16*>(take(all_rows * l.key_depth / 2));
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

// Brings keys and values near in the order in which they are looked at, some lines with each piece
// of work, so that memory is never without work and what came is still in the first-level cache
// when it is wanted: of one span all keys but the leading ones, all values, then the leading keys
// of what comes next.
class Arrivals {
 public:
  Arrivals() = default;
  Arrivals(const Pages& now, const Span& span) {
    const KvLayout& l = now.g.layout;
    const Part keys = part(now, span, 0, l.values);
    add({keys.pages, keys.block + lead(l), keys.end, 0, l.values});
    add(part(now, span, l.values, l.page_bytes - l.values));
  }
  void then(const Pages& next, const Span& span) {
    const KvLayout& l = next.g.layout;
    Part keys = part(next, span, 0, l.values);
    if (keys.block + lead(l) < keys.end) keys.end = keys.block + lead(l);
    add(keys);
  }

  // With each tile of keys, with a pair of a row's sixteens, and with each tile of values: about
  // what these look at, and some while they look at nothing.
  static constexpr int kScoreLines = 3;
  static constexpr int kSoftenLines = 2;
  static constexpr int kWeighLines = 2;

  // So many lines of each of kTogether blocks.
  PYSERVE_INLINE void fetch(int lines) {
    for (; lines > 0; --lines) {
      if (left_ == 0 && !turn()) return;
      for (const std::byte*& at : at_) {
        __builtin_prefetch(at);
        at += kLine;
      }
      --left_;
    }
  }

 private:
  static constexpr int kLine = 64;
  static constexpr int kLeadBytes = 16384;
  // Blocks at once: they come faster so than one after the other.
  static constexpr int kTogether = 4;

  // Some bytes of each of some blocks.
  struct Part {
    const Pages* pages;
    int block;
    int end;
    std::ptrdiff_t begin;
    std::ptrdiff_t bytes;
  };

  static int lead(const KvLayout& l) {
    return l.values < kLeadBytes ? kLeadBytes / static_cast<int>(l.values) : 1;
  }
  static Part part(const Pages& pages, const Span& span, std::ptrdiff_t begin,
                   std::ptrdiff_t bytes) {
    const int size = pages.g.layout.block_size;
    return {&pages, span.begin / size, (span.end - 1) / size + 1, begin, bytes};
  }
  void add(const Part& part) {
    if (part.block < part.end) all_[parts_++] = part;
  }
  bool turn() {
    if (part_ == parts_) return false;
    Part& part = all_[part_];
    for (int i = 0; i < kTogether; ++i) {
      const int block = part.block + i, last = part.end - 1;
      at_[i] = part.pages->of(block < last ? block : last) + part.begin;
    }
    left_ = static_cast<int>(part.bytes / kLine);
    if ((part.block += kTogether) >= part.end) ++part_;
    return true;
  }

  Part all_[3];
  int parts_ = 0;
  int part_ = 0;
  const std::byte* at_[kTogether] = {};
  int left_ = 0;  // lines of each
};

// Scores of `Count` sixteens of keys. Keys and values pass by the first-level cache, which the
// scores need for themselves.
template <int Count>
PYSERVE_INLINE void score_tiles(const KvLayout& l, const bf16* q, const std::byte* const* keys_at,
                                float* scores, Arrivals& arrivals) {
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
    arrivals.fetch(Arrivals::kScoreLines);
    if constexpr (Count > 1) {
      _tile_stream_loadd(5, keys_at[1] + at, step);
      _tile_dpbf16ps(1, 4, 5);
      arrivals.fetch(Arrivals::kScoreLines);
    }
    if constexpr (Count > 2) {
      _tile_stream_loadd(5, keys_at[2] + at, step);
      _tile_dpbf16ps(2, 4, 5);
      arrivals.fetch(Arrivals::kScoreLines);
    }
    if constexpr (Count > 3) {
      _tile_stream_loadd(5, keys_at[3] + at, step);
      _tile_dpbf16ps(3, 4, 5);
      arrivals.fetch(Arrivals::kScoreLines);
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

inline void score_height(const KvLayout& l, const TileRoom& room, const bf16* q, Sixteens s,
                         float* scores, Arrivals& arrivals) {
  int v = s.first;
  for (; v + kSums <= s.last; v += kSums)
    score_tiles<kSums>(l, q, room.keys_at + v, scores + v * kTileFloats, arrivals);
  for (; v < s.last; ++v)
    score_tiles<1>(l, q, room.keys_at + v, scores + v * kTileFloats, arrivals);
}

// A height's weights times the values of the sixteens [first, last), a step at a time, so that it
// can go on between other work: the tile registers are a unit of their own.
class Weighing {
 public:
  Weighing(const KvLayout& l, const TileRoom& room, const float* weights, Sixteens s,
           Arrivals& arrivals)
      : l_(l), room_(room), weights_(weights), s_(s), arrivals_(arrivals), v_(s.first) {}

  // Steps of kSums tiles each that are left before finish has little to do.
  int steps() const { return l_.value_stride / (kSums * kLanes) * (s_.last - s_.first) - done_; }
  // A step is done in kSums parts.
  template <int Part>
  PYSERVE_INLINE void part() {
    const std::ptrdiff_t step = l_.value_stride * 4;
    arrivals_.fetch(Arrivals::kWeighLines);
    if constexpr (Part == 0) {
      if (v_ == s_.first) zero<kSums>();
      load_weights();
    }
    _tile_stream_loadd(7, room_.values_at[v_] + element_ * 4 + Part * kTileRowBytes, step);
    if constexpr (Part == 0) _tile_dpbf16ps(0, 6, 7);
    if constexpr (Part == 1) _tile_dpbf16ps(1, 6, 7);
    if constexpr (Part == 2) _tile_dpbf16ps(2, 6, 7);
    if constexpr (Part == 3) {
      _tile_dpbf16ps(3, 6, 7);
      ++done_;
      if (++v_ == s_.last) store_sums<kSums>();
    }
  }
  // What is left: all of the height's values are in place.
  void finish() {
    while (steps() > 0) {
      part<0>();
      part<1>();
      part<2>();
      part<3>();
    }
    while (element_ < l_.value_stride) {
      zero<1>();
      for (; v_ < s_.last; ++v_) {
        load_weights();
        _tile_stream_loadd(7, room_.values_at[v_] + element_ * 4, l_.value_stride * 4);
        _tile_dpbf16ps(0, 6, 7);
      }
      store_sums<1>();
    }
  }

 private:
  PYSERVE_INLINE void load_weights() {
    _tile_loadd(6, weights_ + v_ / 2 * kTileFloats + v_ % 2 * (kLanes / 2), kTileRowBytes);
  }
  template <int Count>
  PYSERVE_INLINE void zero() {
    _tile_zero(0);
    if constexpr (Count > 1) {
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  template <int Count>
  PYSERVE_INLINE void store_sums() {
    const std::ptrdiff_t step = l_.value_stride * 4;
    float* to = room_.values + element_;
    _tile_stored(0, to, step);
    if constexpr (Count > 1) {
      _tile_stored(1, to + kLanes, step);
      _tile_stored(2, to + 2 * kLanes, step);
      _tile_stored(3, to + 3 * kLanes, step);
    }
    element_ += Count * kLanes;
    v_ = s_.first;
  }

  const KvLayout& l_;
  const TileRoom& room_;
  const float* weights_;
  Sixteens s_;
  Arrivals& arrivals_;
  int element_ = 0;
  int v_;
  int done_ = 0;
};

}  // namespace pyserve::PYSERVE_ISA
