// Vectors of floats as wide as the processor's registers, by the compiler's vector extension: the same source becomes
// AVX-512, AVX2, NEON or plain SSE, whichever the flags allow. Knows arithmetic; nothing of layers and threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace suimon {

#if defined(__AVX512F__)
#define SUIMON_LANES 16
#elif defined(__AVX__)
#define SUIMON_LANES 8
#else
#define SUIMON_LANES 4
#endif
constexpr int LANES = SUIMON_LANES;

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));

// bfloat16 as it lies in memory: the upper half of a float32.
struct bfloat16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(bfloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Round to nearest, ties to even, as PyTorch does; a NaN stays one.
inline void narrow(float value, bfloat16& result) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  result.bits = value != value ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void narrow(float value, float& result) { result = value; }

inline vfloat load(const float* from) {
  vfloat result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

inline vfloat load(const bfloat16* from) {
  vhalf half;
  std::memcpy(&half, from, sizeof(half));
  return (vfloat)(__builtin_convertvector(half, vuint) << 16);
}

inline void store(float* to, vfloat value) { std::memcpy(to, &value, sizeof(value)); }

inline vfloat broadcast(float value) { return value - vfloat{}; }

// The sum of the lanes, always in the same order: the upper half is added to the lower until one is left.
inline float sum(vfloat v) {
#if SUIMON_LANES == 16
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
#elif SUIMON_LANES == 8
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3);
#else
  v += __builtin_shufflevector(v, v, 2, 3, 2, 3);
#endif
  return v[0] + v[1];
}

inline vfloat maximum(vfloat a, vfloat b) { return a > b ? a : b; }
inline vfloat minimum(vfloat a, vfloat b) { return a < b ? a : b; }

inline float largest(vfloat value) {
  float result = value[0];
  for (int i = 1; i < LANES; ++i) result = value[i] > result ? value[i] : result;
  return result;
}

// e^x within two units in the last place for x <= 88; 0 below -87, where results would not be normal numbers.
// x = n ln2 + r with ln2 in two parts (Cody and Waite 1980), and e^r by its power series, |r| <= ln2 / 2.
inline vfloat exponential(vfloat x) {
  const vfloat clamped = minimum(maximum(x, broadcast(-87.0f)), broadcast(88.0f));
  const vfloat magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vfloat n = (clamped * 1.44269504f + magic) - magic;
  const vfloat r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  vfloat p = broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const vint exponent = (__builtin_convertvector(n, vint) + 127) << 23;
  const vfloat result = p * (vfloat)exponent;
  return x < broadcast(-87.0f) ? vfloat{} : result;
}

inline vfloat hyperbolic_tangent(vfloat x) {
  const vfloat bounded = minimum(maximum(x, broadcast(-15.0f)), broadcast(15.0f));
  const vfloat e = exponential(bounded + bounded);
  return (e - 1.0f) / (e + 1.0f);
}

}  // namespace suimon
