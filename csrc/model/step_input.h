// The inputs of one forward pass.
#pragma once

#include <cstdint>
#include <span>

namespace pyserve {

// Flat inputs of one step: T new tokens of S sequences; all indices int32.
struct StepInput {
  std::span<const std::int32_t> input_ids;     // [T]
  std::span<const std::int32_t> positions;     // [T]
  std::span<const std::int32_t> cu_seqlens;    // [S + 1]
  std::span<const std::int32_t> context_lens;  // [S] KV length after the step
  std::span<const std::int32_t> slots;         // [T] block * block_size + offset
  std::span<const std::int32_t> block_table;   // [S, table_width]
  int table_width = 0;
  std::span<const std::int32_t> logit_rows;   // [R] into T
  std::span<const std::int32_t> hidden_rows;  // [E] into T

  int tokens() const { return static_cast<int>(input_ids.size()); }
};

}  // namespace pyserve
