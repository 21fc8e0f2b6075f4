// Drawing a token from a row of logits by as many lanes as there are: what kernels/sample.h does on
// the CPU, in the same order (edits; greedy, or temperature, min-p, top-k, top-p and a draw), with
// the same random number and the same ranking among equals.
//
// Weights are added up as integers, so that no order of addition changes a bit: a row's token does
// not depend on the lanes. Thresholds are found by searching, eight ways a pass over the row,
// rather than by sorting. A filtered draw walks the kept tokens by id, where the CPU sampler's walk
// is in no particular order: the distribution is the same, the token need not be.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "device/host_device.h"
#include "kernels/philox.h"

namespace pyserve {

// One row's parameters, 16 words, as pack_wishes packs them and the op takes them.
struct Wish {
  uint32_t seed_low, seed_high;
  int32_t position;  // the sequence's length: what its next token's random number is keyed by
  int32_t top_k;     // 0: off
  float temperature, top_p, min_p;
  float repetition, frequency, presence;
  int32_t logprobs;              // -1: none
  int32_t bias_begin, bias_end;  // edits that add to a logit (a ban adds -infinity)
  int32_t seen_begin, seen_end;  // edits that penalise a token of the sequence; distinct ids
  int32_t unused;
};
static_assert(sizeof(Wish) == 64);

struct Edit {
  int32_t id;
  int32_t value;  // the bits of a float; or how often the token was put out, 0 if prompt only
  int32_t saved;  // work space: the logit before
};
static_assert(sizeof(Edit) == 12);

enum DrawStatus : int32_t { kDrawn = 0, kNotFinite = 1, kNothingFinite = 2 };

constexpr int kWeightBits = 43;  // a weight of 1; 2^20 of them fit 64 bits
constexpr int kIdBits = 20;
constexpr float kGreedyTemperature = 1e-5f;
constexpr int kWays = 8;

PYSERVE_HOST_DEVICE inline float float_of(int32_t bits) {
#ifdef __CUDA_ARCH__
  return __int_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

PYSERVE_HOST_DEVICE inline int32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_int(value);
#else
  return std::bit_cast<int32_t>(value);
#endif
}

// e^x for x <= 0 to about 1 ulp, the polynomial of kernels/simd.h: the same bits on both sides.
PYSERVE_HOST_DEVICE inline float exp_of(float x) {
  if (!(x >= -87.33654f)) return 0.0f;
  const float shifted = fmaf(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
  float r = fmaf(n, -0.693359375f, x);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fmaf(p, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p, r * r, r + 1.0f);
  return p * float_of((bits_of(shifted) - 0x4B400000 + 127) << 23);
}

// Orders tokens as the sampler ranks them: by logit, and the lower id first among equals. Above 0
// for any id below 2^20.
PYSERVE_HOST_DEVICE inline uint64_t rank_of(float logit, int32_t id) {
  const auto bits = uint32_t(bits_of(logit == 0 ? 0.0f : logit));  // -0 equals 0
  const uint32_t ordered = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << kIdBits | uint64_t((1 << kIdBits) - 1 - id);
}

PYSERVE_HOST_DEVICE inline int32_t id_of(uint64_t rank) {
  return (1 << kIdBits) - 1 - int32_t(rank & ((1 << kIdBits) - 1));
}

// floor(u * total) for u in [0, 1), exactly: u's 53 bits times the total.
PYSERVE_HOST_DEVICE inline uint64_t share_of(uint64_t total, double u) {
  const auto bits = uint64_t(u * 0x1p53);
  return uint64_t((static_cast<unsigned __int128>(bits) * total) >> 53);
}

// The row's place among what a step draws.
struct DrawRows {
  static constexpr int kLanes = 512;
  float* logits;  // [R, vocabulary]; edited while a row is drawn, restored after
  int32_t vocabulary;
  const Wish* wishes;  // [R]
  Edit* edits;
  int32_t width;  // of the two below
  int32_t* tokens;
  float* logprobs;
  int32_t* top_ids;     // [R, width], -1 beyond what the row asks for
  float* top_logprobs;  // [R, width], -infinity there
  int32_t* status;

  template <typename Lanes>
  PYSERVE_HOST_DEVICE void operator()(const Lanes& lanes, int64_t row) const {
    const Wish wish = wishes[row];
    float* x = logits + row * vocabulary;
    for (int i = lanes.index; i < width; i += lanes.count) {
      top_ids[row * width + i] = -1;
      top_logprobs[row * width + i] = -INFINITY;
    }
    lanes.sync();
    uint64_t best;
    int32_t outcome = best_of(lanes, x, best);
    double log_total = 0;
    int32_t token = 0;
    if (outcome == kDrawn && wish.logprobs >= 0) log_total = report(lanes, x, wish, best, row);
    if (outcome == kDrawn) {
      apply(lanes, x, wish);
      outcome = best_of(lanes, x, best);
      if (outcome == kDrawn) {
        token = wish.temperature < kGreedyTemperature ? id_of(best) : draw(lanes, x, wish, best);
      }
      lanes.sync();  // all have drawn before logits change
      restore(lanes, x, wish);
    }
    if (lanes.index != 0) return;
    tokens[row] = token;
    status[row] = outcome;
    logprobs[row] = wish.logprobs >= 0 && outcome == kDrawn ? float(x[token] - log_total) : NAN;
  }

 private:
  template <typename Lanes>
  PYSERVE_HOST_DEVICE int32_t best_of(const Lanes& lanes, const float* x, uint64_t& best) const {
    uint64_t top = 0;
    uint32_t bad = 0;
    for (int32_t id = lanes.index; id < vocabulary; id += lanes.count) {
      if (!(x[id] < INFINITY)) bad = 1;
      const uint64_t rank = rank_of(x[id], id);
      top = rank > top ? rank : top;
    }
    bad = lanes.max(bad);
    best = lanes.max(top);
    if (bad != 0) return kNotFinite;
    return x[id_of(best)] == -INFINITY ? kNothingFinite : kDrawn;
  }

  PYSERVE_HOST_DEVICE static uint64_t weight_of(float logit, float top, float scale) {
    return uint64_t(exp_of((logit - top) * scale) * float(uint64_t{1} << kWeightBits));
  }

  // Log-probabilities of the logits as they came; returns the log of their sum.
  template <typename Lanes>
  PYSERVE_HOST_DEVICE double report(const Lanes& lanes, const float* x, const Wish& wish,
                                    uint64_t best, int64_t row) const {
    const float top = x[id_of(best)];
    uint64_t mass = 0;
    for (int32_t id = lanes.index; id < vocabulary; id += lanes.count) {
      mass += weight_of(x[id], top, 1);
    }
    const double log_total = top + std::log(double(lanes.sum(mass)) * 0x1p-43);
    const int count = wish.logprobs < vocabulary ? wish.logprobs : vocabulary;
    for (int i = 0; i < count; ++i) {
      if (lanes.index == 0) {
        top_ids[row * width + i] = id_of(best);
        top_logprobs[row * width + i] = float(x[id_of(best)] - log_total);
      }
      uint64_t next = 0;
      for (int32_t id = lanes.index; id < vocabulary; id += lanes.count) {
        const uint64_t rank = rank_of(x[id], id);
        if (rank < best && rank > next) next = rank;
      }
      best = lanes.max(next);
    }
    return log_total;
  }

  template <typename Lanes>
  PYSERVE_HOST_DEVICE void apply(const Lanes& lanes, float* x, const Wish& wish) const {
    lanes.sync();            // all have read what they needed of the logits as they came
    if (lanes.index == 0) {  // an id may come twice
      for (int32_t i = wish.bias_begin; i < wish.bias_end; ++i) {
        float& logit = x[edits[i].id];
        edits[i].saved = bits_of(logit);
        logit += float_of(edits[i].value);
      }
    }
    lanes.sync();
    for (int32_t i = wish.seen_begin + lanes.index; i < wish.seen_end; i += lanes.count) {
      Edit& edit = edits[i];
      float& logit = x[edit.id];
      edit.saved = bits_of(logit);
      logit = logit > 0 ? logit / wish.repetition : logit * wish.repetition;
      if (edit.value > 0) {
        logit -= wish.frequency * float(edit.value);
        logit -= wish.presence;
      }
    }
    lanes.sync();
  }

  template <typename Lanes>
  PYSERVE_HOST_DEVICE void restore(const Lanes& lanes, float* x, const Wish& wish) const {
    for (int32_t i = wish.seen_begin + lanes.index; i < wish.seen_end; i += lanes.count) {
      x[edits[i].id] = float_of(edits[i].saved);
    }
    lanes.sync();
    if (lanes.index == 0) {
      for (int32_t i = wish.bias_end; i-- > wish.bias_begin;) {
        x[edits[i].id] = float_of(edits[i].saved);
      }
    }
    lanes.sync();
  }

  // A token's rank and how much it counts for.
  struct Entry {
    uint64_t rank, amount;
  };

  // The greatest cut in [low, high] at or above which entries amount to `goal` or more; at `low`
  // they must. entry(id) is called for every token, several times.
  template <typename Lanes, typename F>
  PYSERVE_HOST_DEVICE uint64_t greatest_cut(const Lanes& lanes, uint64_t low, uint64_t high,
                                            uint64_t goal, const F& entry) const {
    while (low < high) {  // the cut is in [low, high]
      const uint64_t step = (high - low + kWays - 1) / kWays;
      uint64_t above[kWays] = {};
      for (int32_t id = lanes.index; id < vocabulary; id += lanes.count) {
        const Entry e = entry(id);
        for (int way = 1; way < kWays + 1; ++way) {
          if (e.rank >= low + way * step) above[way - 1] += e.amount;
        }
      }
      int passed = 0;
      for (int way = 0; way < kWays; ++way) {
        if (lanes.sum(above[way]) >= goal) passed = way + 1;
      }
      low += passed * step;
      if (low > high) low = high;
      const uint64_t next = low + step - 1;
      high = next < high ? next : high;
    }
    return low;
  }

  template <typename Lanes>
  PYSERVE_HOST_DEVICE int32_t draw(const Lanes& lanes, const float* x, const Wish& wish,
                                   uint64_t best) const {
    const float top = x[id_of(best)], scale = 1 / wish.temperature;
    uint64_t cut = 0;
    // What min-p and the cut so far leave.
    const auto kept = [&](int32_t id) -> Entry {
      const uint64_t rank = rank_of(x[id], id);
      const uint64_t weight = weight_of(x[id], top, scale);
      const auto lightest = uint64_t(wish.min_p * float(uint64_t{1} << kWeightBits));
      return {rank, rank >= cut && weight >= lightest ? weight : 0};
    };
    const auto total = [&] {
      uint64_t mass = 0;
      for (int32_t id = lanes.index; id < vocabulary; id += lanes.count) mass += kept(id).amount;
      return lanes.sum(mass);
    };
    if (wish.top_k > 0) {
      const auto counted = [&](int32_t id) -> Entry {
        const Entry e = kept(id);
        return {e.rank, e.amount > 0 ? 1u : 0u};
      };
      uint64_t left = 0;
      for (int32_t id = lanes.index; id < vocabulary; id += lanes.count) left += counted(id).amount;
      if (lanes.sum(left) > uint64_t(wish.top_k)) {
        cut = greatest_cut(lanes, 0, best, uint64_t(wish.top_k), counted);
      }
    }
    uint64_t mass = total();
    if (wish.top_p < 1) {
      const auto goal = uint64_t(std::ceil(double(wish.top_p) * double(mass)));
      cut = greatest_cut(lanes, cut, best, goal > 0 ? goal : 1, kept);
      mass = total();
    }
    // By id: the first token up to which more than this much is kept.
    const uint64_t share = share_of(
        mass, uniform(uint64_t{wish.seed_high} << 32 | wish.seed_low, uint64_t(wish.position)));
    const auto last = uint64_t(vocabulary - 1);
    const uint64_t found = greatest_cut(lanes, 0, last, share + 1, [&](int32_t id) -> Entry {
      return {last - uint64_t(id), kept(id).amount};
    });
    return vocabulary - 1 - int32_t(found);
  }
};

}  // namespace pyserve
