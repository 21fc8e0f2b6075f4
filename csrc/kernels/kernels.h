// The kernels that the forward pass is made of, as one table per instruction set.
//
// The same source (gemm.h, quant_gemm.h, attention.h, norm.h, activation.h on top of simd.h) is
// compiled once per instruction set (isa_*.cpp). Within one instruction set every output element is
// computed by one fixed sequence of operations, whatever else is in the batch: that is what makes
// results batch-invariant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/bf16.h"
#include "kernels/kv_layout.h"

namespace pyserve {

enum class DType : int { float32 = 0, bfloat16 = 1 };

constexpr std::size_t element_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

constexpr std::ptrdiff_t round_up(std::ptrdiff_t n, std::ptrdiff_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// c[rows, columns] = bias + a[rows, depth] * panel[depth, panel_columns], columns <= panel_columns.
// One accumulator per output element, over depth in ascending order.
struct GemmArgs {
  const float* a;
  std::ptrdiff_t lda;
  int rows;
  const void* panel;
  int depth;
  const float* bias;  // panel_columns of them, or null
  float* c;
  std::ptrdiff_t ldc;
  int columns;
};

// How a quantised weight is stored: GGUF's Q8_0, Q4_0 and Q4_1, and bytes with a minimum. With u
// the stored bits as an unsigned integer, d a block's scale and m its minimum, a weight is d * (u -
// 128), d * (u - 8), d * u + m, and for q8_1 d * u + m with u <= 127, so that sums of two products
// fit 16 bits. stored_format.h says which types of files become which.
enum class QuantType : int { q8_0 = 0, q4_0 = 1, q4_1 = 2, q8_1 = 3 };

inline constexpr int kQuantTypes = 4;

inline constexpr int kQuantDepth = 32;    // elements along K that share a scale
inline constexpr int kQuantColumns = 32;  // outputs that a panel interleaves

constexpr int quant_offset(QuantType type) {
  return type == QuantType::q8_0 ? 128 : type == QuantType::q4_0 ? 8 : 0;
}
// Whether an integer takes a byte, else half of one.
constexpr bool quant_has_bytes(QuantType type) {
  return type == QuantType::q8_0 || type == QuantType::q8_1;
}
constexpr bool quant_has_minimum(QuantType type) {
  return type == QuantType::q4_1 || type == QuantType::q8_1;
}

// A panel of a quantised weight: its blocks in ascending order of depth, one stream through memory.
// Of each block come the scales, [1 or 2][columns] float16 (d, and m where there is one); then the
// integers. Bytes lie as [8][columns][4], depth 4 g + j of a column at [g][column][j]; halves of
// bytes as [4][columns][4], depth 4 g + j in the low half of [g][column][j] and depth 16 + 4 g + j
// in the high one. Integer dot products of four neighbours thus fill one 32-bit lane a column.
struct QuantPanel {
  int scale_bytes;    // of one block
  int integer_bytes;  // of one block

  constexpr explicit QuantPanel(QuantType type)
      : scale_bytes(kQuantColumns * (quant_has_minimum(type) ? 4 : 2)),
        integer_bytes(kQuantColumns * kQuantDepth / (quant_has_bytes(type) ? 1 : 2)) {}
  constexpr int block_bytes() const { return scale_bytes + integer_bytes; }
  constexpr std::ptrdiff_t bytes(int blocks) const {
    return std::ptrdiff_t{blocks} * block_bytes();
  }
};

// 32 activations as x = scale * value, value in [-127, 127]. Where one of them is not finite, scale
// is NaN, and so is every output that the row has a part in.
struct QuantBlock {
  float scale;
  float weighted_sum;       // scale * sum
  std::int32_t offset_8;    // -8 times the sum of the values: a dot product with u - 8 starts here
  std::int32_t offset_128;  // -128 times it
  std::int8_t values[kQuantDepth];
};

// c[rows, columns] = bias + a * panel, columns <= kQuantColumns. Integers within a block of 32,
// exact; blocks are added in ascending order of depth, in float32 and the same way on every
// instruction set that has a fused multiply-add.
struct QuantGemmArgs {
  const QuantBlock* a;
  std::ptrdiff_t lda;  // in blocks
  int rows;
  const std::uint8_t* panel;
  int blocks;
  const float* bias;  // kQuantColumns of them, or null
  float* c;
  std::ptrdiff_t ldc;
  int columns;
};

// Where products are made of bfloat16 tiles: what a panel and its blocks measure, and how many rows
// are multiplied together.
inline constexpr int kTileColumns = 32;
inline constexpr int kTileDepth = 32;
inline constexpr int kTileRowGroup = 32;

// c[rows, columns] = bias + a * panel, columns <= kTileColumns. Sums are float32: in ascending
// order of depth block by block, each block's even and odd depths for themselves.
struct TileGemmArgs {
  const bf16* a;       // whole groups of rows, whole blocks of zeros past the depth
  std::ptrdiff_t lda;  // in elements
  int rows;
  const std::uint8_t* panel;
  int blocks;
  const float* bias;  // kTileColumns of them, or null
  float* c;
  std::ptrdiff_t ldc;
  int columns;
};

// One layer's paged keys and values, and the queries that look at them.
struct AttentionArgs {
  const float* q;  // [tokens, heads * head_dim], rotated and scaled
  std::ptrdiff_t ldq;
  float* out;  // [tokens, heads * head_dim]
  std::ptrdiff_t ldo;
  const std::byte* pages;  // of the layer in block 0
  KvLayout layout;
  int heads;
  int window;  // 0: full
};

// Some consecutive tokens of one sequence against one kv head.
struct AttentionTile {
  int first_token;  // index into the flat step
  int tokens;
  int first_position;  // of first_token in its sequence
  const std::int32_t* blocks;
  int kv_head;
  const AttentionTile* next = nullptr;  // whose keys may be brought near meanwhile
};

struct Kernels {
  std::string_view name;
  int lanes;
  int panel_columns;
  int tile_rows;  // rows of a register tile: row blocks are best multiples of it

  // Indexed by DType of weights.
  void (*gemm[2])(const GemmArgs&);
  void (*quant_gemm[kQuantTypes])(const QuantGemmArgs&);  // indexed by QuantType
  // blocks * kQuantDepth floats to 8 bits, each block by its greatest magnitude; ties to even.
  void (*quantize_row)(const float* x, int blocks, QuantBlock* out);

  // With tiles, where the instruction set has them; else null. Weights in bfloat16, and quantised
  // ones indexed by QuantType.
  void (*tile_gemm)(const TileGemmArgs&) = nullptr;
  void (*quant_tile_gemm[kQuantTypes])(const TileGemmArgs&) = {};
  // n floats to bfloat16, to nearest with ties to even, and zeros up to a multiple of kTileDepth.
  void (*round_row)(const float* x, int n, bf16* out) = nullptr;

  // Indexed by KvType. Writes one token's keys and values, float32 [kv_heads, head_dim] each, at
  // `offset` of the block whose pages of the layer begin at `pages`.
  void (*write_kv[kKvTypes])(const KvLayout&, std::byte* pages, int offset, const float* key,
                             const float* value);
  bool kv_tiles;  // bfloat16 keys and values lie as tile registers take them
  // Query rows that best share one pass over keys and values.
  int attention_rows[kKvTypes];
  void (*attention[kKvTypes])(const AttentionArgs&, const AttentionTile&, float* scratch);
  // One span of a tile (see attention.h), whose result is kept in `partial` until merge_spans has
  // those of all the spans that the tile's keys lie in, [spans, attention_partial_floats].
  void (*attention_span[kKvTypes])(const AttentionArgs&, const AttentionTile&, int span,
                                   float* scratch, float* partial);
  void (*merge_spans)(const AttentionArgs&, const AttentionTile&, int spans, const float* partials,
                      float* scratch);
  int (*attention_span_keys)(const KvLayout&);
  std::size_t (*attention_partial_floats)(const KvLayout&, int rows);
  std::size_t (*attention_scratch_floats)(const KvLayout&, int rows);

  // out = x / rms(x) * weight over n elements; out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n,
                     float* out);
  void (*add)(float* x, const float* y, int n);
  // gate = act(gate) * up; and for models without a gate, x = act(x).
  void (*silu_mul)(float* gate, const float* up, int n);
  void (*gelu_mul)(float* gate, const float* up, int n);
  void (*silu)(float* x, int n);
  void (*gelu)(float* x, int n);
  // Rotates x[i], x[i + half] by the angle whose cosine and sine are given, then scales both.
  void (*rotate)(float* x, const float* cosine, const float* sine, int half, float scale);

  // The greatest of n values; NaN if one of them is NaN or +infinity.
  float (*finite_max)(const float* x, int n);
  // weights[i] = e^((x[i] - top) * scale) for x <= top; returns their sum.
  float (*exp_sum)(const float* x, int n, float top, float scale, float* weights);

  // For measuring what a core can do at best. Multiply-adds between registers, in float32, in 8
  // bits, and of bfloat16 tiles where there are any; each returns the number of operations, two a
  // multiply-add.
  double (*peak_float)(std::int64_t turns);
  double (*peak_int)(std::int64_t turns);
  double (*peak_tile)(std::int64_t turns) = nullptr;
  void (*read_bytes)(const char* from, std::size_t bytes);  // loads, and nothing else
};

enum class Isa { portable, avx2, avx512, amx };

// Whether this build and this processor have it.
bool isa_supported(Isa isa);
// Whether the processor has bfloat16 dot products.
bool has_bfloat16();
// By name; "" is PYSERVE_ISA or else the best there is. Throws std::invalid_argument for an unknown
// or unsupported one.
const Kernels& kernels_for(std::string_view name);

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
void set_vnni(Kernels& kernels);  // isa_avx512_vnni.cpp
#endif

}  // namespace pyserve
