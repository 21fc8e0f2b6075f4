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

// Folds f over x: lane i % kLanes takes element i, then lanes are combined by halves, then the tail
// added.
template <typename F>
PYSERVE_INLINE float fold(const float* x, int n, F f) {
  Vec sum = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = f(sum, load(x + i));
  float total = sum_lanes(sum);
  for (; i < n; ++i) total += f(Vec{}, splat(x[i]))[0];
  return total;
}

inline void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  const float squares = fold(x, n, SquaredDistance{Vec{}});
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n,
                       float* out) {
  const float mean = fold(x, n, Sum{}) / static_cast<float>(n);
  const float squares = fold(x, n, SquaredDistance{splat(mean)});
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

inline void add(float* x, const float* y, int n) {
  for (int i = 0; i < n; ++i) x[i] += y[i];
}

}  // namespace pyserve::PYSERVE_ISA
