#include "device/wishes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "device/draw.h"

namespace pyserve {
namespace {

// Collects the edits of one row.
class RowEdits {
 public:
  RowEdits(std::vector<Edit>& edits, int64_t vocabulary) : edits_(edits), vocabulary_(vocabulary) {}

  int32_t size() const { return int32_t(edits_.size()); }
  int64_t beyond() const { return beyond_; }  // -1: all ids are in the vocabulary

  void add(int32_t id, int32_t value) {
    if (id >= vocabulary_) beyond_ = id;
    edits_.push_back({id, value, 0});
  }

 private:
  std::vector<Edit>& edits_;
  int64_t vocabulary_;
  int64_t beyond_ = -1;
};

void add_biases(const SamplingParams& p, int64_t output_tokens, RowEdits& edits) {
  for (const auto& [id, bias] : p.logit_bias) edits.add(id, std::bit_cast<int32_t>(bias));
  if (output_tokens >= p.min_tokens) return;
  const auto ban = std::bit_cast<int32_t>(-std::numeric_limits<float>::infinity());
  for (int32_t id : p.banned_until_min) edits.add(id, ban);
}

void add_seen(const BlockPool& pool, int32_t row, RowEdits& edits) {
  std::unordered_map<int32_t, int32_t> counts;
  std::vector<int32_t> order;
  const auto tokens = pool.tokens(row);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto [at, is_new] = counts.try_emplace(tokens[i], 0);
    if (is_new) order.push_back(tokens[i]);
    if (int64_t(i) >= pool.prompt_len(row)) ++at->second;
  }
  for (int32_t id : order) edits.add(id, counts[id]);
}

}  // namespace

PackedWishes pack_wishes(const BlockPool& pool, const SamplerState& state,
                         std::span<const int32_t> rows, int64_t vocabulary) {
  PackedWishes packed;
  std::vector<Wish> wishes;
  std::vector<Edit> edits;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SamplingParams& p = state.at(rows[i]);
    const int64_t length = pool.length(rows[i]);
    RowEdits row(edits, vocabulary);
    Wish wish = {.seed_low = uint32_t(p.seed),
                 .seed_high = uint32_t(p.seed >> 32),
                 .position = int32_t(length),
                 .top_k = int32_t(std::min<int64_t>(p.top_k, vocabulary)),
                 .temperature = p.temperature,
                 .top_p = p.top_p,
                 .min_p = p.min_p,
                 .repetition = p.repetition_penalty,
                 .frequency = p.frequency_penalty,
                 .presence = p.presence_penalty,
                 .logprobs = int32_t(std::min<int64_t>(p.logprobs, vocabulary)),
                 .bias_begin = row.size()};
    add_biases(p, length - pool.prompt_len(rows[i]), row);
    wish.bias_end = wish.seen_begin = row.size();
    if (p.penalized()) add_seen(pool, rows[i], row);
    wish.seen_end = row.size();
    wishes.push_back(wish);
    if (row.beyond() >= 0) {
      packed.failures.push_back({int64_t(i), "token " + std::to_string(row.beyond()) +
                                                 " is beyond the vocabulary of " +
                                                 std::to_string(vocabulary)});
    }
  }
  packed.words.resize((wishes.size() * sizeof(Wish) + edits.size() * sizeof(Edit)) / 4);
  std::memcpy(packed.words.data(), wishes.data(), wishes.size() * sizeof(Wish));
  if (!edits.empty()) {
    std::memcpy(packed.words.data() + wishes.size() * sizeof(Wish) / 4, edits.data(),
                edits.size() * sizeof(Edit));
  }
  return packed;
}

}  // namespace pyserve
