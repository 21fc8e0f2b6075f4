// Top-k and top-p by partition, never by a full sort.
//
// Rank is by logit, highest first, and by token id among equals: the kept set is exact whatever the
// ties.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace pyserve {

struct TokenWeight {
  float logit;
  float weight;  // exp((logit - top) / temperature)
  int32_t id;
};

inline bool ranks_before(const TokenWeight& a, const TokenWeight& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// A logit below which none of the `count` best can lie, found from the chunks' maxima alone.
float floor_of_top(std::span<const float> maxima, int64_t count, std::vector<float>& scratch);

// Keeps the `count` best, in no particular order.
void keep_top(std::vector<TokenWeight>& tokens, int64_t count);

// Keeps the best whose weights add up to `mass`: the fewest that do, and at least one.
void keep_mass(std::vector<TokenWeight>& tokens, double mass);

}  // namespace pyserve
