// The two passes over logits that sampling is made of. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

// The greatest of n values; NaN if one of them is NaN or +infinity.
inline float finite_max(const float* x, int n) {
  const Vec infinity = splat(__builtin_inff());
  Vec top = -infinity;
  IntVec bad = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec value = load(x + i);
    top = max(value, top);
    bad |= ~(value < infinity);
  }
  float greatest = max_lanes(top);
  bool poisoned = false;
  for (int lane = 0; lane < kLanes; ++lane) poisoned |= bad[lane] != 0;
  for (; i < n; ++i) {
    greatest = x[i] > greatest ? x[i] : greatest;
    poisoned |= !(x[i] < __builtin_inff());
  }
  return poisoned ? __builtin_nanf("") : greatest;
}

// weights[i] = e^((x[i] - top) * scale); returns their sum, in a fixed order.
inline float exp_sum(const float* x, int n, float top, float scale, float* weights) {
  const Vec shift = splat(top), factor = splat(scale);
  Vec sum = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec weight = exp((load(x + i) - shift) * factor);
    store(weights + i, weight);
    sum += weight;
  }
  float total = sum_lanes(sum);
  if (i < n) store_first(weights + i, exp((load_first(x + i, n - i) - shift) * factor), n - i);
  for (; i < n; ++i) total += weights[i];
  return total;
}

}  // namespace pyserve::PYSERVE_ISA
