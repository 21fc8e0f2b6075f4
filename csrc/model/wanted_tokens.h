// Which tokens of a step anybody wants an output of.
#pragma once

#include <vector>

#include "model/step_input.h"

namespace pyserve {

// The tokens whose logits or hidden state are asked for: in the last layer all others are through
// as soon as their keys and values are written.
class WantedTokens {
 public:
  void plan(const StepInput& step);

  bool all() const { return all_; }
  std::span<const std::int32_t> tokens() const { return tokens_; }  // ascending, each once
  // Where in tokens() the step's logit_rows and hidden_rows are.
  std::span<const std::int32_t> logits_at() const { return logits_at_; }
  std::span<const std::int32_t> hidden_at() const { return hidden_at_; }
  // These tokens as a step of their own, as far as attention reads it: every run of neighbours is a
  // sequence. Only where not all().
  StepInput step() const;

 private:
  void plan_runs(const StepInput& step);

  bool all_ = false;
  std::vector<std::int32_t> tokens_, logits_at_, hidden_at_;
  std::vector<std::int32_t> cu_seqlens_, context_lens_, block_table_;
  int table_width_ = 0;
};

}  // namespace pyserve
