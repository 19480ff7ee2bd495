// Norms, gates and rotations of single rows. All arithmetic is float32.
#pragma once

#include <cstdint>

namespace suimon {

enum class Activation : int64_t { silu = 0, gelu_tanh = 1, gelu = 2 };

// y = x / sqrt(mean(x^2) + eps) * weight over `size` features (Zhang and Sennrich 2019). y may be x.
void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y);

// y = activation(gate) * up over `size` features.
void gate(const float* gate, const float* up, Activation activation, int64_t size, float* y);

// Rotate the first R of a head's features in place (Su et al. 2021): feature i is paired with i + R / 2. `cos` and `sin`
// have R entries, each feature's own, the sine of the first of a pair negative.
void rotate(float* head, const float* cos, const float* sin, int64_t R);

}  // namespace suimon
