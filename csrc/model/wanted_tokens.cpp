#include "model/wanted_tokens.h"

#include <algorithm>

namespace pyserve {

void WantedTokens::plan(const StepInput& step) {
  tokens_.assign(step.logit_rows.begin(), step.logit_rows.end());
  tokens_.insert(tokens_.end(), step.hidden_rows.begin(), step.hidden_rows.end());
  std::sort(tokens_.begin(), tokens_.end());
  tokens_.erase(std::unique(tokens_.begin(), tokens_.end()), tokens_.end());
  all_ = tokens_.size() == step.input_ids.size();
  const auto find = [this](std::span<const std::int32_t> rows, std::vector<std::int32_t>& at) {
    at.clear();
    for (std::int32_t row : rows)
      at.push_back(static_cast<std::int32_t>(std::lower_bound(tokens_.begin(), tokens_.end(), row) -
                                             tokens_.begin()));
  };
  find(step.logit_rows, logits_at_);
  find(step.hidden_rows, hidden_at_);
  if (!all_) plan_runs(step);
}

void WantedTokens::plan_runs(const StepInput& step) {
  cu_seqlens_.assign(1, 0);
  context_lens_.clear();
  block_table_.clear();
  table_width_ = step.table_width;
  std::size_t s = 0;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::int32_t token = tokens_[i];
    while (step.cu_seqlens[s + 1] <= token) ++s;
    const std::int32_t end = step.cu_seqlens[s + 1];
    if (i + 1 < tokens_.size() && tokens_[i + 1] == token + 1 && token + 1 < end) continue;
    cu_seqlens_.push_back(static_cast<std::int32_t>(i + 1));
    context_lens_.push_back(step.context_lens[s] - (end - token - 1));
    const auto blocks = step.block_table.subspan(s * table_width_, table_width_);
    block_table_.insert(block_table_.end(), blocks.begin(), blocks.end());
  }
}

StepInput WantedTokens::step() const {
  return {.input_ids = {},
          .positions = {},
          .cu_seqlens = cu_seqlens_,
          .context_lens = context_lens_,
          .slots = {},
          .block_table = block_table_,
          .table_width = table_width_,
          .logit_rows = {},
          .hidden_rows = {}};
}

}  // namespace pyserve
