// How each row wants its tokens drawn.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pyserve {

struct SamplingParams {
  float temperature = 1;  // 0: greedy
  float top_p = 1;        // 1: off
  int64_t top_k = 0;      // 0: off
  float min_p = 0;        // 0: off
  float frequency_penalty = 0, presence_penalty = 0;
  float repetition_penalty = 1;
  uint64_t seed = 0;
  int64_t min_tokens = 0;  // output tokens before any of `banned_until_min` may come
  std::vector<int32_t> banned_until_min;
  std::vector<std::pair<int32_t, float>> logit_bias;
  int64_t logprobs = -1;  // top log-probabilities wanted; 0: the drawn token's only; -1: none

  bool penalized() const {
    return frequency_penalty != 0 || presence_penalty != 0 || repetition_penalty != 1;
  }
};

class SamplerState {
 public:
  // Raises std::invalid_argument, and changes nothing, where a value is out of range.
  void set(int32_t row, SamplingParams params);
  void clear(int32_t row);
  // Raises std::invalid_argument where nothing is set.
  const SamplingParams& at(int32_t row) const;

 private:
  std::vector<std::optional<SamplingParams>> params_;  // by row
};

}  // namespace pyserve
