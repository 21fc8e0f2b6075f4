// Activations and rotary embedding of one row. Included by isa_*.cpp only.
#pragma once

namespace pyserve::PYSERVE_ISA {

struct Silu {
  PYSERVE_INLINE Vec operator()(Vec x) const { return x * reciprocal(splat(1.0f) + exp(-x)); }
};

// 0.5 x (1 + tanh(u)) == x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
struct GeluTanh {
  PYSERVE_INLINE Vec operator()(Vec x) const {
    const Vec cubic = fma(x * x, x * splat(0.044715f), x);
    return x * reciprocal(splat(1.0f) + exp(cubic * splat(-1.5957691216f)));
  }
};

template <typename F>
PYSERVE_INLINE void map_gated(float* gate, const float* up, int n, F f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(gate + i, f(load(gate + i)) * load(up + i));
  if (i < n)
    store_first(gate + i, f(load_first(gate + i, n - i)) * load_first(up + i, n - i), n - i);
}

template <typename F>
PYSERVE_INLINE void map(float* x, int n, F f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, f(load(x + i)));
  if (i < n) store_first(x + i, f(load_first(x + i, n - i)), n - i);
}

inline void silu_mul(float* gate, const float* up, int n) { map_gated(gate, up, n, Silu{}); }
inline void gelu_mul(float* gate, const float* up, int n) { map_gated(gate, up, n, GeluTanh{}); }
inline void silu(float* x, int n) { map(x, n, Silu{}); }
inline void gelu(float* x, int n) { map(x, n, GeluTanh{}); }

inline void rotate(float* x, const float* cosine, const float* sine, int half, float scale) {
  const Vec scales = splat(scale);
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(x + i), b = load(x + i + half), c = load(cosine + i), s = load(sine + i);
    store(x + i, (a * c - b * s) * scales);
    store(x + i + half, (b * c + a * s) * scales);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = (a * cosine[i] - b * sine[i]) * scale;
    x[i + half] = (b * cosine[i] + a * sine[i]) * scale;
  }
}

}  // namespace pyserve::PYSERVE_ISA
