#include "kernels/sample.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "kernels/kernels.h"
#include "kernels/philox.h"
#include "kernels/sample_filter.h"
#include "kernels/thread_pool.h"

namespace pyserve {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kGreedyBelow = 1e-5f;  // temperatures whose inverse could overflow, as in vLLM

// Rows are worked on in chunks of fixed size: sums stay exact enough in float, and a draw finds its
// chunk without walking the vocabulary.
constexpr int64_t kChunk = 256;
constexpr int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }

struct Reject {
  std::string reason;
};

// Working memory of one thread, for rows of `vocabulary` logits.
class RowSampler {
 public:
  explicit RowSampler(size_t vocabulary)
      : kernels_(kernels_for("")),
        adjusted_(vocabulary),
        weights_(vocabulary),
        counts_(vocabulary),
        maxima_(chunks_of(vocabulary)),
        sums_(chunks_of(vocabulary)) {}

  size_t vocabulary() const { return adjusted_.size(); }

  // A row's sequence: what its next token depends on beside the logits.
  struct Sequence {
    std::span<const int32_t> tokens;
    int64_t prompt_len;
    const SamplingParams& params;
  };
  struct Output {
    int32_t& token;
    float& logprob;
    std::span<int32_t> top_ids;
    std::span<float> top_logprobs;
  };

  void sample(std::span<const float> logits, const Sequence& sequence, const Output& out) {
    const SamplingParams& p = sequence.params;
    std::ranges::fill(out.top_ids, -1);
    std::ranges::fill(out.top_logprobs, -kInfinity);
    float top = top_of(logits);
    std::optional<double> log_total;
    if (p.logprobs >= 0) {
      log_total = log_sum(logits, top);
      top_logprobs(logits, *log_total, p.logprobs, out);
    }
    const std::span<const float> adjusted = adjust(logits, sequence);
    if (adjusted.data() != logits.data()) top = top_of(adjusted);
    out.token =
        p.temperature < kGreedyBelow ? first_at(adjusted, top) : draw(adjusted, top, sequence);
    out.logprob =
        log_total ? float(logits[out.token] - *log_total) : std::numeric_limits<float>::quiet_NaN();
  }

 private:
  float top_of(std::span<const float> logits) {
    float top = -kInfinity;
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      const auto part = chunk_of(logits, chunk);
      maxima_[chunk] = kernels_.finite_max(part.data(), int(part.size()));
      if (std::isnan(maxima_[chunk])) throw Reject{"the logits are not finite"};
      top = std::max(top, maxima_[chunk]);
    }
    if (top == -kInfinity) throw Reject{"no token has a finite logit"};
    return top;
  }

  // Fills weights_ with e^((logit - top) * scale), and sums_.
  void weigh(std::span<const float> logits, float top, float scale) {
    for (size_t chunk = 0; chunk < sums_.size(); ++chunk) {
      const auto part = chunk_of(logits, chunk);
      sums_[chunk] = kernels_.exp_sum(part.data(), int(part.size()), top, scale,
                                      weights_.data() + chunk * kChunk);
    }
  }

  double total_weight() const { return std::accumulate(sums_.begin(), sums_.end(), 0.0); }

  static std::span<const float> chunk_of(std::span<const float> row, size_t chunk) {
    return row.subspan(chunk * kChunk, std::min<size_t>(kChunk, row.size() - chunk * kChunk));
  }

  double log_sum(std::span<const float> logits, float top) {
    weigh(logits, top, 1);
    return top + std::log(total_weight());
  }

  // Needs the maxima of these very logits.
  void top_logprobs(std::span<const float> logits, double log_total, int64_t count,
                    const Output& out) {
    count = std::min(count, int64_t(logits.size()));
    if (count == 0) return;
    gather(logits, floor_of_top(maxima_, count, scratch_), 0);
    keep_top(kept_, count);
    std::ranges::sort(kept_, ranks_before);
    for (size_t i = 0; i < kept_.size(); ++i) {
      out.top_ids[i] = kept_[i].id;
      out.top_logprobs[i] = float(kept_[i].logit - log_total);
    }
  }

  // The logits after bias, ban and penalties: themselves where there are none.
  std::span<const float> adjust(std::span<const float> logits, const Sequence& sequence) {
    const SamplingParams& p = sequence.params;
    const int64_t output_tokens = int64_t(sequence.tokens.size()) - sequence.prompt_len;
    const bool ban = output_tokens < p.min_tokens && !p.banned_until_min.empty();
    if (!ban && p.logit_bias.empty() && !p.penalized()) return logits;
    std::ranges::copy(logits, adjusted_.begin());
    for (const auto& [id, bias] : p.logit_bias) adjusted(id) += bias;
    if (ban) {
      for (int32_t id : p.banned_until_min) adjusted(id) = -kInfinity;
    }
    if (p.penalized()) penalize(sequence);
    return adjusted_;
  }

  float& adjusted(int32_t id) {
    if (size_t(id) >= adjusted_.size()) {
      throw Reject{"token " + std::to_string(id) + " is beyond the vocabulary of " +
                   std::to_string(adjusted_.size())};
    }
    return adjusted_[id];
  }

  // counts_ is all zero before and after. -1 marks a token that only the prompt has.
  void penalize(const Sequence& sequence) {
    const SamplingParams& p = sequence.params;
    for (int32_t id : sequence.tokens) adjusted(id);  // raises before anything is counted
    const auto prompt = sequence.tokens.first(sequence.prompt_len);
    for (int32_t id : prompt) counts_[id] = -1;
    for (int32_t id : sequence.tokens.subspan(sequence.prompt_len)) {
      counts_[id] = std::max(counts_[id], 0) + 1;
    }
    for (int32_t id : sequence.tokens) {
      if (counts_[id] == 0) continue;  // dealt with at its first place
      float& logit = adjusted_[id];
      logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
      if (counts_[id] > 0) {
        logit -= p.frequency_penalty * float(counts_[id]);
        logit -= p.presence_penalty;
      }
      counts_[id] = 0;
    }
  }

  static int32_t first_at(std::span<const float> logits, float value) {
    return int32_t(std::ranges::find(logits, value) - logits.begin());
  }

  // Needs the maxima of these very logits.
  int32_t draw(std::span<const float> logits, float top, const Sequence& sequence) {
    const SamplingParams& p = sequence.params;
    weigh(logits, top, 1 / p.temperature);
    const double at = uniform(p.seed, sequence.tokens.size());
    if (p.top_k == 0 && p.top_p >= 1 && p.min_p == 0) return draw_from_all(at);
    filter(logits, top, p);
    return draw_from_kept(at);
  }

  // Leaves in kept_ what min-p, top-k and top-p leave.
  void filter(std::span<const float> logits, float top, const SamplingParams& p) {
    if (p.top_k > 0) {
      gather(logits, floor_of_top(maxima_, p.top_k, scratch_), p.min_p);
      keep_top(kept_, p.top_k);
      if (p.top_p < 1) keep_mass(kept_, double(p.top_p) * kept_weight());
    } else if (p.top_p < 1) {
      gather_nucleus(logits, top, p);
    } else {
      gather(logits, floor_of_weight(top, p.min_p, p.temperature), p.min_p);
    }
  }

  // A logit that no token of at least this weight is below, whatever the rounding.
  static float floor_of_weight(float top, float weight, float temperature) {
    return top + temperature * (std::log(weight) - 1e-3f) - 1e-6f * std::abs(top);
  }

  double kept_weight() const {
    double weight = 0;
    for (const TokenWeight& token : kept_) weight += token.weight;
    return weight;
  }

  // Calls visit(id, weight) for the tokens of at least this logit and this weight, in order.
  template <typename Visit>
  void for_each_token(std::span<const float> logits, float min_logit, float min_weight,
                      Visit visit) const {
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      if (maxima_[chunk] < min_logit) continue;
      const size_t begin = chunk * kChunk, end = std::min(begin + kChunk, logits.size());
      for (size_t id = begin; id < end; ++id) {
        if (logits[id] >= min_logit && weights_[id] >= min_weight) visit(id, weights_[id]);
      }
    }
  }

  void gather(std::span<const float> logits, float min_logit, float min_weight) {
    kept_.clear();
    for_each_token(logits, min_logit, min_weight, [&](size_t id, float weight) {
      kept_.push_back({logits[id], weight, int32_t(id)});
    });
  }

  // Top-p of all tokens: adds weights up in bins by their leading bits (eighths of an octave), so
  // that only the bin in which the nucleus ends is ever partitioned.
  void gather_nucleus(std::span<const float> logits, float top, const SamplingParams& p) {
    // Tokens lighter than (1 - p) / V weigh less than 1 - p together, and the best alone weighs 1.
    const float lightest = p.min_p > 0 ? p.min_p : (1 - p.top_p) / float(logits.size());
    const float floor = floor_of_weight(top, lightest, p.temperature);
    bins_.fill(0);
    for_each_token(logits, floor, lightest,
                   [&](size_t, float weight) { bins_[bin_of(weight)] += weight; });
    const double mass =
        p.min_p > 0 ? std::accumulate(bins_.begin(), bins_.end(), 0.0) : total_weight();
    double lacking = double(p.top_p) * mass;
    size_t last = bin_of(1);
    while (last > 0 && bins_[last] < lacking) lacking -= bins_[last--];

    kept_.clear();
    edge_.clear();
    for_each_token(logits, floor, lightest, [&](size_t id, float weight) {
      const size_t bin = bin_of(weight);
      if (bin >= last) (bin > last ? kept_ : edge_).push_back({logits[id], weight, int32_t(id)});
    });
    keep_mass(edge_, lacking);
    kept_.insert(kept_.end(), edge_.begin(), edge_.end());
  }

  static size_t bin_of(float weight) { return std::bit_cast<uint32_t>(weight) >> 20; }

  // Rounding may leave a little of the draw when all weight is used up: then it is the last token
  // that has any.
  int32_t draw_from_all(double at) const {
    double left = at * total_weight();
    size_t drawn = 0;
    for (size_t chunk = 0; chunk < sums_.size(); ++chunk) {
      if (sums_[chunk] == 0) continue;
      drawn = chunk;
      if (left < sums_[chunk]) break;
      left -= sums_[chunk];
    }
    int32_t last = -1;
    const auto weights = chunk_of(weights_, drawn);
    for (size_t i = 0; i < weights.size() && left >= 0; ++i) {
      if (weights[i] > 0) last = int32_t(drawn * kChunk + i);
      left -= weights[i];
    }
    return last;
  }

  int32_t draw_from_kept(double at) const {
    double left = at * kept_weight();
    int32_t last = -1;
    for (size_t i = 0; i < kept_.size() && left >= 0; ++i) {
      if (kept_[i].weight > 0) last = kept_[i].id;
      left -= kept_[i].weight;
    }
    return last;
  }

  const Kernels& kernels_;
  std::vector<float> adjusted_, weights_;
  std::vector<int32_t> counts_;
  std::vector<float> maxima_;
  std::vector<double> sums_;  // of weights_, by chunk
  std::vector<float> scratch_;
  std::vector<TokenWeight> kept_, edge_;
  std::array<double, 1024> bins_;  // weights are at most 1, so their bins are at most 0x3F8
};

// This thread's working memory, kept from step to step.
RowSampler& row_sampler(size_t vocabulary) {
  thread_local std::optional<RowSampler> sampler;
  if (!sampler || sampler->vocabulary() != vocabulary) sampler.emplace(vocabulary);
  return *sampler;
}

}  // namespace

int64_t top_width(const SamplerState& state, std::span<const int32_t> rows) {
  int64_t width = 0;
  for (int32_t row : rows) width = std::max(width, state.at(row).logprobs);
  return width;
}

std::vector<SampleFailure> sample(std::span<const float> logits, const BlockPool& pool,
                                  const SamplerState& state, std::span<const int32_t> rows,
                                  const SampleOutput& out) {
  if (rows.empty()) return {};
  if (logits.empty() || logits.size() % rows.size() != 0) {
    throw std::invalid_argument("logits must have one row for each of rows");
  }
  const size_t vocabulary = logits.size() / rows.size();
  std::vector<RowSampler::Sequence> sequences;
  for (int32_t row : rows) {
    sequences.push_back({pool.tokens(row), pool.prompt_len(row), state.at(row)});
  }
  std::vector<std::string> rejected(rows.size());
  shared_pool().run(int(rows.size()), [&](int i, int) {
    try {
      row_sampler(vocabulary)
          .sample(logits.subspan(i * vocabulary, vocabulary), sequences[i],
                  {out.tokens[i], out.logprobs[i], out.top_ids.subspan(i * out.width, out.width),
                   out.top_logprobs.subspan(i * out.width, out.width)});
    } catch (const Reject& reject) {
      rejected[i] = reject.reason;
    }
  });
  std::vector<SampleFailure> failures;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!rejected[i].empty()) failures.push_back({int64_t(i), rejected[i]});
  }
  return failures;
}

}  // namespace pyserve
