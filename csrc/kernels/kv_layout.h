// How keys and values lie in the paged cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyserve {

// What keys and values are stored as; arithmetic is float32, but for the products of int8 keys.
enum class KvType : int { float32 = 0, bfloat16 = 1, int8 = 2 };
inline constexpr int kKvTypes = 3;
// Sums of its products stay below 2^24, so that floats hold them exactly.
inline constexpr int kMaxInt8HeadDim = 1024;

// A page is what one block has of one layer's kv head: keys, then values. A block is
// [layer][kv_head] pages, so the system's memory is taken block by block.
//
// Keys lie transposed, [head_dim][key_stride], so that lanes are keys in q.k; values lie
// [block_size][value_stride], so that lanes are head elements in p.v. The strides are block_size
// and head_dim rounded up to the lanes. Of bfloat16 two vectors share their 32-bit lanes, so that
// one operation widens each: keys are [head_dim / 2][key_stride][2], and of values each pair of
// vectors [lanes][2] (a last single one lies as it is). Of int8 keys four neighbouring elements lie
// together, [head_dim / 4][key_stride][4], as unsigned bytes (128 more than the number); behind
// keys and values stand their float32 scales, [key_stride] each.
//
// For tile registers bfloat16 values lie by pairs of keys, [key_stride / 2][value_stride][2], and
// of keys there are so many rows that the depth is a multiple of 16. What lies between block_size
// and key_stride, or beyond head_dim, is never written: it stays zero.
struct KvLayout {
  KvType type = KvType::float32;
  int kv_heads = 0;
  int head_dim = 0;
  int block_size = 0;  // tokens
  int key_stride = 0;
  int value_stride = 0;
  int key_depth = 0;          // head_dim, padded to what the products take
  std::ptrdiff_t values = 0;  // byte of a page where values begin
  std::ptrdiff_t key_scales = 0;
  std::ptrdiff_t value_scales = 0;
  std::ptrdiff_t page_bytes = 0;
  std::ptrdiff_t layer_bytes = 0;  // of one block
  std::ptrdiff_t block_bytes = 0;

  KvLayout() = default;
  KvLayout(KvType kv_type, int layers, int heads, int dim, int tokens, int lanes, bool tiles)
      : type(kv_type), kv_heads(heads), head_dim(dim), block_size(tokens) {
    const auto up = [](std::ptrdiff_t n, std::ptrdiff_t to) { return (n + to - 1) / to * to; };
    key_stride = static_cast<int>(up(tokens, lanes));
    value_stride = static_cast<int>(up(dim, lanes));
    const std::ptrdiff_t size = kv_type == KvType::float32    ? 4
                                : kv_type == KvType::bfloat16 ? 2
                                                              : 1;
    const bool scaled = kv_type == KvType::int8;
    const bool tiled = kv_type == KvType::bfloat16 && tiles;
    key_depth = static_cast<int>(up(dim, tiled ? 16 : 4 / size));
    values = up(std::ptrdiff_t{key_depth} * key_stride * size, 64);
    key_scales = up(values + size * (tiled ? key_stride : tokens) * value_stride, 64);
    value_scales = key_scales + (scaled ? 4 * key_stride : 0);
    page_bytes = up(value_scales + (scaled ? 4 * key_stride : 0), 64);
    layer_bytes = page_bytes * heads;
    block_bytes = layer_bytes * layers;
  }
};

}  // namespace pyserve
