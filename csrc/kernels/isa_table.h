// Everything that is compiled once per instruction set. Included by isa_*.cpp only, after they have
// chosen PYSERVE_ISA (a namespace), PYSERVE_LANES, PYSERVE_TILE_ROWS and the compiler's target.
#pragma once

#include "kernels/simd.h"
// simd.h first: the others build on it.
#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/peak.h"
#include "kernels/quantize.h"
#include "kernels/softmax.h"

namespace pyserve::PYSERVE_ISA {

inline Kernels table(const char* name) {
  return {
      .name = name,
      .lanes = kLanes,
      .panel_columns = kPanelColumns,
      .tile_rows = kTileRows,
      .gemm = {gemm<float>, gemm<bf16>},
      .quant_gemm = {},  // by set_quant_gemm
      .quantize_row = quantize_row,
      .write_kv = {write_kv<float>, write_kv<bf16>, write_kv<std::int8_t>},
      .kv_tiles = false,
      .attention_rows = {kAttentionRows, kAttentionRows, kAttentionRows},
      .attention = {attention<float>, attention<bf16>, attention<std::int8_t>},
      .attention_span = {attention_span<float>, attention_span<bf16>, attention_span<std::int8_t>},
      .merge_spans = merge_spans,
      .attention_span_keys = attention_span_keys,
      .attention_partial_floats = attention_partial_floats,
      .attention_scratch_floats = attention_scratch_floats,
      .rms_norm = rms_norm,
      .layer_norm = layer_norm,
      .add = add,
      .silu_mul = silu_mul,
      .gelu_mul = gelu_mul,
      .silu = silu,
      .gelu = gelu,
      .rotate = rotate,
      .finite_max = finite_max,
      .exp_sum = exp_sum,
      .peak_float = peak_float,
      .peak_int = nullptr,  // where quant_gemm is
      .read_bytes = read_bytes,
  };
}

}  // namespace pyserve::PYSERVE_ISA
