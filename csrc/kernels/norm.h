// RMSNorm and LayerNorm of one row, in float32. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

struct Sum {
  PYSERVE_INLINE Vec operator()(Vec sum, Vec x) const { return sum + x; }
};

struct SquaredDistance {
  Vec centre;
  PYSERVE_INLINE Vec operator()(Vec sum, Vec x) const {
    const Vec distance = x - centre;
    return fma(distance, distance, sum);
  }
};

// Folds f over x: vector i of kLanes elements into sum i % 4, so that additions need not wait for
// each other; then the sums, the lanes by halves, and the tail.
template <typename F>
PYSERVE_INLINE float fold(const float* x, int n, F f) {
  Vec sums[4] = {};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) sums[s] = f(sums[s], load(x + i + s * kLanes));
  for (; i + kLanes <= n; i += kLanes) sums[0] = f(sums[0], load(x + i));
  float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) total += f(Vec{}, splat(x[i]))[0];
  return total;
}

inline void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  const float squares = fold(x, n, SquaredDistance{Vec{}});
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
  const Vec scales = splat(scale);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scales * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n,
                       float* out) {
  const float mean = fold(x, n, Sum{}) / static_cast<float>(n);
  const float squares = fold(x, n, SquaredDistance{splat(mean)});
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
  const Vec means = splat(mean), scales = splat(scale);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, (load(x + i) - means) * scales * load(weight + i) + load(bias + i));
  for (; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

inline void add(float* x, const float* y, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) + load(y + i));
  for (; i < n; ++i) x[i] += y[i];
}

}  // namespace pyserve::PYSERVE_ISA
