#include "batch/pack.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "batch/indexing.h"

namespace pyserve {
namespace {

PackedSizes measure(const BlockPool& pool, std::span<const int32_t> rows,
                    std::span<const int32_t> takes, const StepArrays& out) {
  if (rows.size() != takes.size()) throw std::invalid_argument("rows and takes differ in length");
  PackedSizes sizes{
      .tokens = 0, .sequences = int64_t(rows.size()), .table_blocks = 0, .sampled = 0};
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t context = pool.computed(rows[i]) + takes[i];
    const int64_t blocks = pool.blocks_for(context);
    if (takes[i] <= 0 || context > pool.length(rows[i]) ||
        blocks > int64_t(pool.blocks(rows[i]).size())) {
      throw std::invalid_argument("row " + std::to_string(rows[i]) + " cannot take " +
                                  std::to_string(takes[i]) +
                                  " token(s): none, or beyond its tokens or its blocks");
    }
    sizes.tokens += takes[i];
    sizes.table_blocks = std::max(sizes.table_blocks, blocks);
  }
  if (sizes.sequences > int64_t(out.context_lens.size()) ||
      sizes.tokens > int64_t(out.input_ids.size()) ||
      sizes.sequences * sizes.table_blocks > int64_t(out.block_table.size())) {
    throw std::invalid_argument("the step (" + std::to_string(sizes.tokens) + " tokens, " +
                                std::to_string(sizes.sequences) + " sequences of up to " +
                                std::to_string(sizes.table_blocks) +
                                " blocks) does not fit its buffers");
  }
  return sizes;
}

void pack_tokens(const BlockPool& pool, int32_t row, int32_t begin, int32_t take,
                 const StepArrays& out) {
  const auto tokens = pool.tokens(row).subspan(pool.computed(row), take);
  std::ranges::copy(tokens, out.input_ids.begin() + begin);
  const int32_t* blocks = pool.blocks(row).data();
  const auto context = int32_t(pool.computed(row)) + take;
  for (int32_t token = begin; token < begin + take; ++token) {
    const int32_t position = position_of(context, begin + take, token);
    out.positions[token] = position;
    out.slot_mapping[token] = slot_of(blocks, int32_t(pool.block_size()), position);
  }
}

}  // namespace

PackedSizes pack(const BlockPool& pool, std::span<const int32_t> rows,
                 std::span<const int32_t> takes, const StepArrays& out) {
  PackedSizes sizes = measure(pool, rows, takes, out);
  int32_t begin = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto context = int32_t(pool.computed(rows[i])) + takes[i];
    pack_tokens(pool, rows[i], begin, takes[i], out);
    out.cu_seqlens[i] = begin;
    out.context_lens[i] = context;
    begin += takes[i];
    if (context == pool.length(rows[i])) {
      out.sample_seq[sizes.sampled] = int32_t(i);
      out.logit_rows[sizes.sampled++] = begin - 1;
    }
    const auto table = out.block_table.subspan(i * sizes.table_blocks, sizes.table_blocks);
    const auto own = pool.blocks(rows[i]).first(pool.blocks_for(context));
    std::fill(std::ranges::copy(own, table.begin()).out, table.end(), 0);
  }
  out.cu_seqlens[rows.size()] = begin;
  return sizes;
}

}  // namespace pyserve
