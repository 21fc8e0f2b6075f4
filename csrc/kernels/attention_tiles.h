// The two register tiles of attention, queries against keys and weights against values, over the
// pages of one span. Included by attention.h only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// Views into the caller's scratch: everything one tile needs.
struct Workspace {
  float* scores;         // [rows, score_stride], a column for each slot of the span
  float* values;         // [rows, value_stride] of the current span
  float* merged;         // [rows, value_stride] of the spans before
  float* q;              // [rows, depth]: of int8 keys the integers
  std::int8_t* q_bytes;  // [rows, depth], where byte products are used
  std::int32_t* q_sum;   // [rows] of those integers
  float* q_scale;        // [rows] that they are to be multiplied by
  float* top;            // [rows] maximum of the spans before
  float* mass;           // [rows] sum of weights of the spans before, relative to top
  float* span_top;
  float* span_mass;
  std::ptrdiff_t score_stride;
  int depth;  // head_dim, padded to what the products take
};

// Positions [begin, end) of one span, which some row of the tile sees.
struct Span {
  int first_block;  // index into the sequence's block table
  int begin;
  int end;
};

struct Pages {
  const AttentionArgs& g;
  const AttentionTile& tile;

  PYSERVE_INLINE const std::byte* of(int block) const {
    return g.pages + tile.blocks[block] * g.layout.block_bytes + tile.kv_head * g.layout.page_bytes;
  }
};

PYSERVE_INLINE Vec load(const std::int8_t* p) {
#if PYSERVE_LANES == 16
  // All lanes by a mask: GCC 12 warns that the plain intrinsics use something uninitialised.
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return __builtin_convertvector((IntVec)_mm512_maskz_cvtepi8_epi32(0xFFFF, bytes), Vec);
#elif PYSERVE_LANES == 8
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef std::int8_t ByteVec __attribute__((vector_size(kLanes)));
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}

// Two bfloat16 numbers in each lane.
PYSERVE_INLINE void load_pair(const std::byte* p, Vec& low, Vec& high) {
  WordVec words;
  __builtin_memcpy(&words, p, sizeof words);
  low = (Vec)(words << 16);
  high = (Vec)(words & 0xFFFF0000u);
}

// Vectors of keys, or of head elements, that a register tile of so many rows takes at a time: few
// rows need more of them to keep the multipliers busy.
template <int Rows>
inline constexpr int kTileVectors = 2 * Rows <= kTileRows ? 4 : 2;

template <typename T>
inline constexpr bool kQuantized = false;
template <>
inline constexpr bool kQuantized<std::int8_t> = true;

// Elements of one key that lie together, in 32 bits.
template <typename T>
inline constexpr int kTogether = 4 / sizeof(T);

#ifdef PYSERVE_VNNI
inline constexpr bool kByteProducts = true;
#else
inline constexpr bool kByteProducts = false;
#endif

// acc[r][v] = q_r . keys_v. Every lane is its own chain over the depth.
template <typename T, int Rows, int Vectors>
PYSERVE_INLINE void dot_keys(const KvLayout& l, const Workspace& w, int row,
                             const std::byte* const (&keys)[Vectors],
                             const std::byte* const (&ahead)[Vectors], Vec (&acc)[Rows][Vectors]) {
  const float* q = w.q + std::ptrdiff_t{row} * w.depth;
  const std::ptrdiff_t step = l.key_stride * 4;
  constexpr int kDepths = kTogether<T>;
  for (int p = 0; p < w.depth / kDepths; ++p) {
    Vec column[kDepths][Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      __builtin_prefetch(ahead[v] + p * step);
      if constexpr (kDepths == 1)
        column[0][v] = load(reinterpret_cast<const float*>(keys[v] + p * step));
      else
        load_pair(keys[v] + p * step, column[0][v], column[1][v]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < kDepths; ++i)
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Vec value = splat(q[r * w.depth + kDepths * p + i]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(value, column[i][v], acc[r][v]);
      }
  }
}

// The same for int8: integers, exact, so that products of bytes and of floats give the same.
template <int Rows, int Vectors>
PYSERVE_INLINE void dot_int8_keys(const KvLayout& l, const Workspace& w, int row,
                                  const std::byte* const (&keys)[Vectors],
                                  const std::byte* const (&ahead)[Vectors],
                                  Vec (&acc)[Rows][Vectors]) {
  const std::ptrdiff_t step = l.key_stride * 4;
#ifdef PYSERVE_VNNI
  const std::int8_t* q = w.q_bytes + std::ptrdiff_t{row} * w.depth;
  __m512i sums[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[r][v] = _mm512_set1_epi32(-128 * w.q_sum[row + r]);
  for (int p = 0; p < w.depth / 4; ++p) {
    __m512i column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      __builtin_prefetch(ahead[v] + p * step);
      column[v] = _mm512_loadu_si512(keys[v] + p * step);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      std::int32_t four;
      __builtin_memcpy(&four, q + r * w.depth + 4 * p, sizeof four);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], column[v], _mm512_set1_epi32(four));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) acc[r][v] = __builtin_convertvector((IntVec)sums[r][v], Vec);
#else
  const float* q = w.q + std::ptrdiff_t{row} * w.depth;
  for (int p = 0; p < w.depth; ++p) {
    Vec column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      __builtin_prefetch(ahead[v] + p / 4 * step);
      IntVec four;
      __builtin_memcpy(&four, keys[v] + p / 4 * step, sizeof four);
      column[v] = __builtin_convertvector(((four >> p % 4 * 8) & 0xFF) - 128, Vec);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec value = splat(q[r * w.depth + p]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(value, column[v], acc[r][v]);
    }
  }
#endif
}

// Scores of `Rows` rows against the vectors [v, v + Vectors) of the span's slots.
template <typename T, int Rows, int Vectors>
PYSERVE_INLINE void score_vectors(const Pages& pages, const Workspace& w, int row, const Span& span,
                                  int begin, int v, int end) {
  const KvLayout& l = pages.g.layout;
  const int per_block = l.key_stride / kLanes;
  constexpr std::ptrdiff_t kVectorBytes = kLanes * 4;
  const std::byte *keys[Vectors], *ahead[Vectors];
  const float* scales[Vectors];
#pragma GCC unroll 4
  for (int i = 0; i < Vectors; ++i) {
    const auto page_of = [&](int vector) {
      return pages.of(span.first_block + vector / per_block);
    };
    const std::byte* page = page_of(v + i);
    const int lane = (v + i) % per_block;
    keys[i] = page + lane * kVectorBytes;
    scales[i] = reinterpret_cast<const float*>(page + l.key_scales) + lane * kLanes;
    // What is needed next: more keys, or the first values.
    const int next = v + Vectors + i;
    ahead[i] = next < end ? page_of(next) + next % per_block * kVectorBytes
                          : page_of(begin + (next - end) % (end - begin)) + l.values;
  }
  Vec acc[Rows][Vectors] = {};
  if constexpr (kQuantized<T>)
    dot_int8_keys<Rows, Vectors>(l, w, row, keys, ahead, acc);
  else
    dot_keys<T, Rows, Vectors>(l, w, row, keys, ahead, acc);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) {
      if constexpr (kQuantized<T>)
        acc[r][i] = acc[r][i] * load(scales[i]) * splat(w.q_scale[row + r]);
      store(w.scores + (row + r) * w.score_stride + (v + i) * kLanes, acc[r][i]);
    }
}

template <typename T, int Rows>
inline void score_rows(const Pages& pages, const Workspace& w, int row, const Span& span, int begin,
                       int end) {
  constexpr int kVectors = kTileVectors<Rows>;
  int v = begin;
  for (; v + kVectors <= end; v += kVectors)
    score_vectors<T, Rows, kVectors>(pages, w, row, span, begin, v, end);
  if constexpr (kVectors > 2)
    for (; v + 2 <= end; v += 2) score_vectors<T, Rows, 2>(pages, w, row, span, begin, v, end);
  for (; v < end; ++v) score_vectors<T, Rows, 1>(pages, w, row, span, begin, v, end);
}

// values[row, element...] = sum over the keys [span.begin, end) of weight * value.
template <typename T, int Rows, int Vectors>
PYSERVE_INLINE void weigh_vectors(const Pages& pages, const Workspace& w, int row, const Span& span,
                                  int end, int element) {
  const KvLayout& l = pages.g.layout;
  const std::ptrdiff_t row_bytes = l.value_stride * sizeof(T);
  const int last_block = (end - 1) / l.block_size;
  Vec acc[Rows][Vectors] = {};
  int block = span.begin / l.block_size, offset = span.begin % l.block_size;
  for (; block <= last_block; ++block, offset = 0) {
    const int left = end - block * l.block_size;
    const int stop = left < l.block_size ? left : l.block_size;
    const std::byte* from = pages.of(block) + l.values + element * sizeof(T);
    const int next = block + 2 <= last_block ? block + 2 : last_block;
    const std::byte* ahead = pages.of(next) + l.values + element * sizeof(T);
    const float* weights =
        w.scores + row * w.score_stride + std::ptrdiff_t{block - span.first_block} * l.key_stride;
    for (int key = offset; key < stop; ++key) {
      Vec column[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) {
        if (v * kLanes * sizeof(T) % 64 == 0)
          __builtin_prefetch(ahead + key * row_bytes + v * kLanes * sizeof(T));
        if constexpr (sizeof(T) != 2 || Vectors == 1)
          column[v] = load(reinterpret_cast<const T*>(from + key * row_bytes) + v * kLanes);
      }
      if constexpr (sizeof(T) == 2 && Vectors > 1)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; v += 2)
          load_pair(from + key * row_bytes + v * kLanes * sizeof(T), column[v], column[v + 1]);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Vec weight = splat(weights[r * w.score_stride + key]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(weight, column[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      store(w.values + (row + r) * std::ptrdiff_t{l.value_stride} + element + v * kLanes,
            acc[r][v]);
}

template <typename T, int Rows>
inline void weigh_rows(const Pages& pages, const Workspace& w, int row, const Span& span, int end) {
  constexpr int kVectors = kTileVectors<Rows>;
  const int width = pages.g.layout.value_stride;
  int element = 0;
  for (; element + kVectors * kLanes <= width; element += kVectors * kLanes)
    weigh_vectors<T, Rows, kVectors>(pages, w, row, span, end, element);
  if constexpr (kVectors > 2)
    for (; element + 2 * kLanes <= width; element += 2 * kLanes)
      weigh_vectors<T, Rows, 2>(pages, w, row, span, end, element);
  for (; element < width; element += kLanes)
    weigh_vectors<T, Rows, 1>(pages, w, row, span, end, element);
}

}  // namespace pyserve::PYSERVE_ISA
