#include "elementwise.h"

#include "vector.h"

namespace suimon {

namespace {

inline vfloat silu(vfloat x) { return x / (1.0f + exponential(-x)); }

inline vfloat gelu_tanh(vfloat x) {
  const vfloat inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}

inline vfloat gelu(vfloat x) {
  for (int i = 0; i < LANES; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.7071067812f));
  return x;
}

template <class Function>
void gated(const float* gate, const float* up, int64_t size, float* y, Function activation) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(y + i, activation(load(gate + i)) * load(up + i));
  if (i == size) return;
  float g[LANES] = {}, u[LANES] = {};
  std::memcpy(g, gate + i, size_t(size - i) * 4);
  std::memcpy(u, up + i, size_t(size - i) * 4);
  const vfloat result = activation(load(g)) * load(u);
  std::memcpy(y + i, &result, size_t(size - i) * 4);
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  vfloat squares = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < size; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / float(size) + eps);
  for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < size; ++i) y[i] = x[i] * scale * weight[i];
}

void gate(const float* g, const float* up, Activation activation, int64_t size, float* y) {
  switch (activation) {
    case Activation::silu:
      return gated(g, up, size, y, silu);
    case Activation::gelu_tanh:
      return gated(g, up, size, y, gelu_tanh);
    case Activation::gelu:
      return gated(g, up, size, y, gelu);
  }
}

void rotate(float* head, const float* cos, const float* sin, int64_t R) {
  const int64_t half = R / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] + b * sin[i];
    head[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

}  // namespace suimon
