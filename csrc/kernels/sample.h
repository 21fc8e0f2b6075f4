// One token for each row of logits, each drawn as its request wishes.
//
// Order, as in vLLM: logit bias, ban until min_tokens, repetition, frequency and presence
// penalties; then greedy, or temperature, min-p, top-k, top-p (each on what the one before left)
// and a draw. Log-probabilities are of the logits as they came. A row's result depends on the row
// alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/sampler_state.h"
#include "schedule/block_pool.h"

namespace pyserve {

struct SampleOutput {
  std::span<int32_t> tokens;      // [R]
  std::span<float> logprobs;      // [R]; NaN where none were asked for
  std::span<int32_t> top_ids;     // [R, width], best first; -1 beyond what the row asked for
  std::span<float> top_logprobs;  // [R, width]; -infinity there
  int64_t width;
};

struct SampleFailure {
  int64_t index;  // into the R rows
  std::string reason;
};

// Most top log-probabilities that any of `rows` asks for.
int64_t top_width(const SamplerState& state, std::span<const int32_t> rows);

// `logits` is [R, V], dense. Rows that cannot be sampled are returned; their outputs are
// unspecified.
std::vector<SampleFailure> sample(std::span<const float> logits, const BlockPool& pool,
                                  const SamplerState& state, std::span<const int32_t> rows,
                                  const SampleOutput& out);

}  // namespace pyserve
