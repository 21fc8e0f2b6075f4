// Who advances in the next step, and by how many tokens; grows block tables, and preempts where it
// must.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/block_pool.h"

namespace pyserve {

struct Limits {
  int64_t token_budget;    // tokens of the step
  int64_t request_budget;  // rows of the step
  int64_t prefill_budget;  // prefill tokens of the step; -1: no limit of their own
};

// Parallel arrays in rank order, best first: all running rows, then waiting ones.
struct Candidates {
  std::span<const int32_t> rows;
  std::span<const int32_t> want;       // most tokens to take
  std::span<const uint8_t> running;    // 1 running, 0 waiting
  std::span<const int32_t> need_free;  // waiting: blocks that must be available to admit it
};

struct Selection {
  struct Cut {
    int64_t candidate;
    int64_t kept_blocks;
  };
  std::vector<int32_t> take;   // by candidate; 0: does not advance
  std::vector<Cut> preempted;  // were running
  std::vector<Cut> trimmed;    // were waiting, and lost blocks they still held
  int64_t used_tokens = 0;
  int64_t used_requests = 0;
};

Selection select(BlockPool& pool, const Candidates& candidates, const Limits& limits);

}  // namespace pyserve
