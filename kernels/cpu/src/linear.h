// y = x W^T + bias. Shapes: T rows; x (T, in), bias (out), y (T, out) are float32. W (out, in) is packed: panels of 16 rows,
// in which the 16 numbers of one column lie side by side; the last panel is filled up with zeros.
#pragma once

#include "pool.h"

namespace suimon {

constexpr int64_t PANEL = 16;

struct Linear {
  const void* weight;  // packed
  const float* bias;   // null: none
  int64_t in, out;
};

enum class Dtype : int64_t { float32 = 0, bfloat16 = 1 };

inline int64_t panels_of(int64_t out) { return (out + PANEL - 1) / PANEL; }

// Row-major `weight` (out, in) -> `packed` (panels, in, 16).
void pack(Pool& pool, Dtype dtype, const void* weight, int64_t out, int64_t in, void* packed);

// Rows of y may lie `stride` floats apart. `add` adds to what y holds. Every sum runs over the columns in their order,
// whatever T is and however many threads there are, so the result of a row depends on that row alone.
void linear(Pool& pool, const Linear& layer, Dtype dtype, const float* x, int64_t T, float* y, int64_t stride, bool add);

}  // namespace suimon
