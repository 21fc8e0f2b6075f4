#include "schedule/select.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pyserve {
namespace {

// One selection under way. Only rows ranked below the one that needs blocks are ever cut, so the
// best running row advances whenever it fits the pool by itself.
class Selector {
 public:
  Selector(BlockPool& pool, const Candidates& candidates, const Limits& limits)
      : pool_(pool),
        c_(candidates),
        limits_(limits),
        count_(candidates.rows.size()),
        cut_(count_, false),
        prefill_(count_, false) {
    result_.take.assign(count_, 0);
  }

  Selection run() {
    validate();
    const auto waiting = size_t(std::ranges::find(c_.running, 0) - c_.running.begin());
    for (size_t i = 0; i < waiting; ++i) prefill_[i] = !decodes(i);
    std::fill(prefill_.begin() + waiting, prefill_.end(), true);
    for (bool prefill : {false, true}) {
      for (size_t i = 0; i < waiting; ++i) {
        if (prefill_[i] == prefill && !cut_[i]) advance_running(i);
      }
    }
    admit(waiting);
    collect_cuts();
    return std::move(result_);
  }

 private:
  bool decodes(size_t i) const {
    const int32_t row = c_.rows[i];
    return c_.want[i] == 1 && pool_.computed(row) == pool_.length(row) - 1;
  }

  // Tokens that the budgets leave for candidate i.
  int64_t allowed(size_t i) const {
    if (result_.used_requests >= limits_.request_budget) return 0;
    const int32_t row = c_.rows[i];
    int64_t tokens = std::min<int64_t>(c_.want[i], pool_.length(row) - pool_.computed(row));
    tokens = std::min(tokens, limits_.token_budget - result_.used_tokens);
    if (prefill_[i] && limits_.prefill_budget >= 0) {
      tokens = std::min(tokens, limits_.prefill_budget - used_prefill_);
    }
    return std::max<int64_t>(tokens, 0);
  }

  void take(size_t i, int64_t tokens) {
    result_.take[i] = int32_t(tokens);
    result_.used_tokens += tokens;
    result_.used_requests += tokens > 0;
    used_prefill_ += prefill_[i] ? tokens : 0;
  }

  void give_back(size_t i) {
    result_.used_tokens -= result_.take[i];
    result_.used_requests -= result_.take[i] > 0;
    used_prefill_ -= prefill_[i] ? result_.take[i] : 0;
    result_.take[i] = 0;
  }

  void advance_running(size_t i) {
    const int64_t tokens = obtain(i, allowed(i));
    if (tokens < 0) {
      cut(i);
    } else {
      take(i, tokens);
    }
  }

  // Blocks for `tokens` more tokens of candidate i, from lower-ranked rows if need be. Returns how
  // many tokens there is room for: fewer than asked if even that is not enough, -1 if there is room
  // for none at all.
  int64_t obtain(size_t i, int64_t tokens) {
    const int32_t row = c_.rows[i];
    if (tokens == 0) return 0;
    const int64_t goal = pool_.computed(row) + tokens;
    const int64_t lacking = pool_.blocks_for(goal) - int64_t(pool_.blocks(row).size());
    if (lacking > pool_.available()) reclaim(i, lacking);
    const int64_t room =
        (int64_t(pool_.blocks(row).size()) + pool_.available()) * pool_.block_size();
    tokens = std::min(tokens, room - pool_.computed(row));
    if (tokens <= 0) return -1;
    pool_.reserve(row, pool_.computed(row) + tokens);
    return tokens;
  }

  // Trims tails from the worst rank upwards until `needed` blocks are available. First only blocks
  // that come free by it; then shared ones too, which come free when their last owner lets go.
  void reclaim(size_t i, int64_t needed) {
    for (bool shared_too : {false, true}) {
      for (size_t victim = count_; --victim > i && pool_.available() < needed;) {
        trim_tail(victim, needed, shared_too);
      }
    }
  }

  void trim_tail(size_t victim, int64_t needed, bool shared_too) {
    const int32_t row = c_.rows[victim];
    while (pool_.available() < needed && !pool_.blocks(row).empty()) {
      if (!shared_too && pool_.references(pool_.blocks(row).back()) > 1) return;
      pool_.trim(row, int64_t(pool_.blocks(row).size()) - 1);
      cut(victim);
    }
  }

  void cut(size_t i) {
    if (cut_[i]) return;
    cut_[i] = true;
    ++cuts_;
    give_back(i);
  }

  // In order; the first that does not fit closes the door, so that small ones do not starve it.
  // Where nothing runs, whatever is held is held by waiting rows: the best of them goes ahead at
  // the others' cost.
  void admit(size_t first) {
    for (size_t i = first; i < count_ && cuts_ == 0; ++i) {
      const bool alone = i == first && result_.used_tokens == 0;
      const int64_t tokens = alone ? obtain(i, allowed(i)) : fitting(i);
      if (tokens <= 0) return;
      take(i, tokens);
    }
  }

  // All of the chunk that the budgets allow, or nothing.
  int64_t fitting(size_t i) {
    const int64_t tokens = allowed(i);
    const int32_t row = c_.rows[i];
    const bool fits =
        pool_.available() >= c_.need_free[i] && pool_.reserve(row, pool_.computed(row) + tokens);
    return fits ? tokens : 0;
  }

  void collect_cuts() {
    for (size_t i = 0; i < count_; ++i) {
      if (!cut_[i]) continue;
      auto& cuts = c_.running[i] ? result_.preempted : result_.trimmed;
      cuts.push_back({int64_t(i), int64_t(pool_.blocks(c_.rows[i]).size())});
    }
  }

  void validate() const {
    if (c_.want.size() != count_ || c_.running.size() != count_ || c_.need_free.size() != count_) {
      throw std::invalid_argument("rows, want, running and need_free differ in length");
    }
    std::vector<bool> seen(pool_.row_slots(), false);
    for (size_t i = 0; i < count_; ++i) {
      pool_.length(c_.rows[i]);  // raises if not live
      if (seen[c_.rows[i]]) {
        throw std::invalid_argument("row " + std::to_string(c_.rows[i]) + " appears twice");
      }
      seen[c_.rows[i]] = true;
      if (c_.want[i] < 0) throw std::invalid_argument("want must not be negative");
      if (i > 0 && c_.running[i] && !c_.running[i - 1]) {
        throw std::invalid_argument("running candidates must come before waiting ones");
      }
    }
  }

  BlockPool& pool_;
  const Candidates& c_;
  const Limits& limits_;
  size_t count_;
  std::vector<bool> cut_, prefill_;
  int64_t used_prefill_ = 0, cuts_ = 0;
  Selection result_;
};

}  // namespace

Selection select(BlockPool& pool, const Candidates& candidates, const Limits& limits) {
  return Selector(pool, candidates, limits).run();
}

}  // namespace pyserve
