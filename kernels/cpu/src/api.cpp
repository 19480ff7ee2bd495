// What Python calls (kernels/cpu/library.py). Every pointer is to contiguous memory that outlives the call.
#include "decoder.h"
#include "sampling.h"

using namespace suimon;

extern "C" {

// Changes whenever a signature or a struct here does.
int64_t suimon_version() { return 3; }

// Bytes of each struct, so that the two sides' idea of them can be compared.
void suimon_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Linear);
  sizes[1] = sizeof(Layer);
  sizes[2] = sizeof(Decoder);
  sizes[3] = sizeof(Step);
  sizes[4] = sizeof(SampleRow);
}

void* suimon_pool_new(int64_t threads) { return new Pool(int(threads)); }

void suimon_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

void suimon_pack(void* pool, int64_t dtype, const void* weight, int64_t out, int64_t in, void* packed) {
  pack(*static_cast<Pool*>(pool), Dtype(dtype), weight, out, in, packed);
}

void suimon_linear(void* pool, const Linear* layer, int64_t dtype, const float* x, int64_t rows, float* y) {
  linear(*static_cast<Pool*>(pool), *layer, Dtype(dtype), x, rows, y, layer->out, false);
}

void suimon_attend(void* pool, const Attention* shape, int64_t dtype, const float* query, const void* key_cache,
                   const void* value_cache, const Sequences* sequences, float* y) {
  attend(*static_cast<Pool*>(pool), *shape, Dtype(dtype), query, shape->heads * shape->head_dim, key_cache,
         value_cache, *sequences, y);
}

void suimon_decode(void* pool, const Decoder* decoder, const Step* step) {
  decode(*static_cast<Pool*>(pool), *decoder, *step);
}

void suimon_sample(void* pool, const float* logits, int64_t count, int64_t size, int64_t stride, const SampleRow* rows,
                   int64_t* tokens, uint8_t* is_finite) {
  sample(*static_cast<Pool*>(pool), logits, count, size, stride, rows, tokens, is_finite);
}
}
