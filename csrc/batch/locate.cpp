// Position and KV slot of every token of a step, from its small per-sequence arrays, on the CPU.
#include <ATen/ops/empty.h>

#include "batch/indexing.h"
#include "batch/ops.h"
#include "profile/range.h"
#include "tensors.h"

namespace pyserve::cpu {

std::tuple<at::Tensor, at::Tensor> locate(const at::Tensor& cu_seqlens,
                                          const at::Tensor& context_lens,
                                          const at::Tensor& block_table, int64_t block_size,
                                          int64_t num_tokens) {
  const profile::Range range(profile::Op::locate);
  const auto starts = span_of<int32_t>(cu_seqlens, "cu_seqlens");
  const auto lengths = span_of<int32_t>(context_lens, "context_lens");
  const auto table = span_of<int32_t>(block_table, "block_table", 2);
  const auto seqs = int32_t(lengths.size());
  const int64_t width = block_table.size(1);
  TORCH_CHECK_VALUE(
      starts.size() == lengths.size() + 1 && block_table.size(0) == seqs && starts.front() == 0 &&
          starts.back() == num_tokens && block_size > 0,
      "cu_seqlens [S + 1] from 0 to num_tokens, context_lens [S], block_table [S, B]");
  for (int32_t s = 0; s < seqs; ++s) {
    TORCH_CHECK_VALUE(starts[s] <= starts[s + 1] && lengths[s] >= starts[s + 1] - starts[s] &&
                          lengths[s] <= width * block_size,
                      "sequence ", s, " has fewer tokens than it advances by, or too few blocks");
  }
  const at::Tensor positions = at::empty({num_tokens}, at::kInt);
  const at::Tensor slots = at::empty({num_tokens}, at::kInt);
  auto* position = positions.mutable_data_ptr<int32_t>();
  auto* slot = slots.mutable_data_ptr<int32_t>();
  for (int32_t token = 0; token < num_tokens; ++token) {
    const int32_t s = sequence_of(starts.data(), seqs, token);
    position[token] = position_of(lengths[s], starts[s + 1], token);
    slot[token] = slot_of(table.data() + s * width, int32_t(block_size), position[token]);
  }
  return {positions, slots};
}

}  // namespace pyserve::cpu
