// A whole decoder's step in one call. The structs are filled by Python (kernels/cpu/decoder.py), field by field.
//
// Shapes: T tokens, H query heads, KVH key/value heads, D head size, I intermediate features.
#pragma once

#include "attention.h"
#include "elementwise.h"

namespace suimon {

struct Layer {
  Linear qkv;      // (H + 2 KVH) D rows: queries, keys, values
  Linear output;   // of attention
  Linear gate_up;  // 2 I rows: gate, up
  Linear down;
  // Norm weights, float32; null where the family has none.
  const float* input_norm;
  const float* post_attention_norm;  // of what attention adds
  const float* mlp_norm;
  const float* post_mlp_norm;  // of what the MLP adds
  const float* query_norm;     // of each head
  const float* key_norm;
  int64_t window;  // 0: none
  int64_t rope;    // which of the step's rotations
};

struct Decoder {
  int64_t hidden, intermediate, heads, kv_heads, head_dim, rotary_dim, block_size, num_layers;
  Dtype dtype;
  Activation activation;
  float eps, scale, soft_cap, padding;
  const Layer* layers;
  const float* final_norm;
};

struct Step {
  int64_t num_tokens;
  Sequences sequences;
  const int64_t* slots;      // (T,) where each token's key and value go
  const float* const* cos;   // of each rotation: (T, R)
  const float* const* sin;
  void* const* key_caches;   // of each layer
  void* const* value_caches;
  float* hidden;  // (T, hidden): embeddings in, normed hidden states out
};

void decode(Pool& pool, const Decoder& decoder, const Step& step);

}  // namespace suimon
