// One token from each row of logits. The order of operations and what equals mean are those of the sampler
// (core_engine/sampler.py), which this does for the rows that a batch has on the processor.
#pragma once

#include "pool.h"

namespace suimon {

struct SampleRow {
  uint64_t seed, position;  // of the random numbers
  double top_p;             // 1: off
  int64_t top_k;            // 0: off
  float temperature;        // 0: the best entry, the lowest id among equals
  float min_p;              // 0: off
};

// logits (count, size), rows `stride` floats apart -> tokens (count,), and whether each row's logits are finite: no NaN
// and a largest entry that is no infinity; else its token means nothing. A row's token depends on that row alone.
void sample(Pool& pool, const float* logits, int64_t count, int64_t size, int64_t stride, const SampleRow* rows,
            int64_t* tokens, uint8_t* is_finite);

}  // namespace suimon
