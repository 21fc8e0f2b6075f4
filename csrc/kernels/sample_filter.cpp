#include "kernels/sample_filter.h"

#include <algorithm>
#include <functional>

namespace pyserve {

float floor_of_top(std::span<const float> maxima, int64_t count, std::vector<float>& scratch) {
  if (count > int64_t(maxima.size())) return -std::numeric_limits<float>::infinity();
  scratch.assign(maxima.begin(), maxima.end());
  const auto last = scratch.begin() + (count - 1);
  std::nth_element(scratch.begin(), last, scratch.end(), std::greater<>());
  return *last;
}

void keep_top(std::vector<TokenWeight>& tokens, int64_t count) {
  if (count >= int64_t(tokens.size())) return;
  std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end(), ranks_before);
  tokens.resize(count);
}

void keep_mass(std::vector<TokenWeight>& tokens, double mass) {
  constexpr int64_t kSorted = 32;
  auto begin = tokens.begin(), end = tokens.end();
  // All before `begin` are kept and `mass` is what they lack; none from `end` on is needed.
  while (end - begin > kSorted) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, ranks_before);
    double better = 0;
    for (auto token = begin; token != middle; ++token) better += token->weight;
    if (better >= mass) {
      end = middle;
    } else {
      mass -= better;
      begin = middle;
    }
  }
  std::sort(begin, end, ranks_before);
  while (begin != end && (mass > 0 || begin == tokens.begin())) mass -= begin++->weight;
  tokens.erase(begin, tokens.end());
}

}  // namespace pyserve
