// One step's inputs, flat, from the pool's rows: written in one pass into preallocated arrays.
#pragma once

#include <cstdint>
#include <span>

#include "schedule/block_pool.h"

namespace pyserve {

// Where pack writes; the sizes are the most that one step may need.
struct StepArrays {
  std::span<int32_t> input_ids, positions, slot_mapping;    // max_tokens
  std::span<int32_t> cu_seqlens;                            // max_seqs + 1
  std::span<int32_t> context_lens, sample_seq, logit_rows;  // max_seqs
  std::span<int32_t> block_table;                           // max_seqs * max_blocks
};

struct PackedSizes {
  int64_t tokens;        // T
  int64_t sequences;     // S
  int64_t table_blocks;  // B: block_table is [S, B], dense, padded with 0
  int64_t sampled;       // R: sequences that reach their last known token, and so need logits
};

// Row i advances by takes[i] > 0 tokens, for which its table must have room. Raises
// std::invalid_argument.
PackedSizes pack(const BlockPool& pool, std::span<const int32_t> rows,
                 std::span<const int32_t> takes, const StepArrays& out);

}  // namespace pyserve
