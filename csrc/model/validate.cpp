// What a step must be like, so that no kernel reads or writes out of bounds.
#include <stdexcept>
#include <string>

#include "model/decoder.h"

namespace pyserve {

namespace {

void check_range(std::span<const std::int32_t> values, std::int64_t end, const char* name) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] < 0 || values[i] >= end)
      throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) +
                                  "] = " + std::to_string(values[i]) + " is outside [0, " +
                                  std::to_string(end) + ")");
}

}  // namespace

void Decoder::validate(const StepInput& step) const {
  if (!sealed_) throw std::logic_error("forward before seal()");
  if (cache_.num_blocks() == 0) throw std::logic_error("forward before allocate_kv()");
  const std::size_t tokens = step.input_ids.size();
  if (step.positions.size() != tokens || step.slots.size() != tokens)
    throw std::invalid_argument("input_ids, positions and slot_mapping differ in length");
  const std::int64_t slots = std::int64_t{cache_.num_blocks()} * cache_.block_size();
  check_range(step.input_ids, config_.vocab_size, "input_ids");
  check_range(step.positions, config_.learned_positions ? config_.context_length : INT32_MAX,
              "positions");
  check_range(step.slots, slots, "slot_mapping");
  check_range(step.logit_rows, tokens, "logit_rows");
  check_range(step.hidden_rows, tokens, "hidden_rows");
  // More rows than tokens would not fit the work space.
  if (step.logit_rows.size() > tokens) throw std::invalid_argument("more logit_rows than tokens");
  validate_sequences(step);
}

void Decoder::validate_sequences(const StepInput& step) const {
  if (step.cu_seqlens.empty() || step.cu_seqlens.front() != 0 ||
      step.cu_seqlens.back() != static_cast<std::int32_t>(step.input_ids.size()))
    throw std::invalid_argument("cu_seqlens must run from 0 to the number of tokens");
  const std::size_t sequences = step.cu_seqlens.size() - 1;
  if (step.context_lens.size() != sequences ||
      step.block_table.size() != sequences * step.table_width)
    throw std::invalid_argument("context_lens or block_table does not match cu_seqlens");
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::int64_t tokens = std::int64_t{step.cu_seqlens[s + 1]} - step.cu_seqlens[s];
    const std::int64_t length = step.context_lens[s];
    const std::int64_t blocks = (length + cache_.block_size() - 1) / cache_.block_size();
    if (tokens < 0 || tokens > length || blocks > step.table_width)
      throw std::invalid_argument(
          "sequence " + std::to_string(s) + " has " + std::to_string(tokens) + " tokens, context " +
          std::to_string(length) + " and a block table of " + std::to_string(step.table_width));
    check_range(step.block_table.subspan(s * step.table_width, blocks), cache_.num_blocks(),
                "block_table");
  }
}

}  // namespace pyserve
