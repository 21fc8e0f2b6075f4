// The tensors that pack writes into, allocated once, and the views of them that make up one step.
#pragma once

#include <ATen/ops/empty.h>

#include <stdexcept>

#include "batch/pack.h"
#include "tensors.h"

namespace pyserve {

struct PackedStep {
  at::Tensor input_ids, positions, cu_seqlens, context_lens, slot_mapping, block_table, sample_seq,
      logit_rows;
};

class StepBuffers {
 public:
  StepBuffers(int64_t max_tokens, int64_t max_seqs, int64_t max_blocks)
      : buffers_{.input_ids = ints(max_tokens),
                 .positions = ints(max_tokens),
                 .cu_seqlens = ints(max_seqs + 1),
                 .context_lens = ints(max_seqs),
                 .slot_mapping = ints(max_tokens),
                 .block_table = ints(max_seqs * max_blocks),
                 .sample_seq = ints(max_seqs),
                 .logit_rows = ints(max_seqs)} {}

  StepArrays arrays() const {
    const auto span = [](const at::Tensor& t) { return span_of<int32_t>(t, "buffer"); };
    return {.input_ids = span(buffers_.input_ids),
            .positions = span(buffers_.positions),
            .slot_mapping = span(buffers_.slot_mapping),
            .cu_seqlens = span(buffers_.cu_seqlens),
            .context_lens = span(buffers_.context_lens),
            .sample_seq = span(buffers_.sample_seq),
            .logit_rows = span(buffers_.logit_rows),
            .block_table = span(buffers_.block_table)};
  }

  PackedStep views(const PackedSizes& n) const {
    const auto head = [](const at::Tensor& t, int64_t count) { return t.narrow(0, 0, count); };
    return {.input_ids = head(buffers_.input_ids, n.tokens),
            .positions = head(buffers_.positions, n.tokens),
            .cu_seqlens = head(buffers_.cu_seqlens, n.sequences + 1),
            .context_lens = head(buffers_.context_lens, n.sequences),
            .slot_mapping = head(buffers_.slot_mapping, n.tokens),
            .block_table = head(buffers_.block_table, n.sequences * n.table_blocks)
                               .view({n.sequences, n.table_blocks}),
            .sample_seq = head(buffers_.sample_seq, n.sampled),
            .logit_rows = head(buffers_.logit_rows, n.sampled)};
  }

 private:
  static at::Tensor ints(int64_t size) {
    if (size <= 0) throw std::invalid_argument("buffer sizes must be positive");
    return at::empty({size}, at::kInt);
  }

  PackedStep buffers_;  // at full size
};

}  // namespace pyserve
