// Causal attention over the paged cache, prompts and decodes mixed.
//
// A layer's cache is two arrays (num_blocks, block_size, KVH, D) in the model's dtype; a sequence's position p lies in
// block table[p / block_size] at offset p % block_size.
#pragma once

#include "linear.h"

namespace suimon {

struct Attention {
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t window;  // positions that a query sees, its own included; 0: all
  float scale;     // of scores
  float soft_cap;  // of scores, by tanh; 0: none
};

// The sequences of a step: sequence s has the rows query_starts[s] .. query_starts[s + 1] - 1, the last of them at
// position context_lengths[s] - 1, and the blocks of row s of block_tables (num_sequences, max_blocks).
struct Sequences {
  int64_t count, max_blocks;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* block_tables;
};

// query (T, H, D) with rows `stride` floats apart -> y (T, H * D). A row's result depends on its own context alone: the
// sums over positions are taken in blocks that start at multiples of a constant, by the online softmax of Milakov and
// Gimelshein (2018).
void attend(Pool& pool, const Attention& shape, Dtype dtype, const float* query, int64_t stride, const void* key_cache,
            const void* value_cache, const Sequences& sequences, float* y);

}  // namespace suimon
