#include "attention.h"

#include <algorithm>
#include <limits>

#include "vector.h"

namespace suimon {

namespace {

constexpr int64_t SPAN = 64;         // positions whose scores are taken together
constexpr int64_t TILE_TOKENS = 16;  // queries of one sequence that share what they read
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// One KV head of one sequence, and some of its queries.
struct Tile {
  int64_t sequence, kv_head, first_row, num_rows, first_position;
};

struct Task {
  const Attention& shape;
  const float* query;
  int64_t stride;
  const void* keys;
  const void* values;
  const Sequences& sequences;
  float* y;
};

// Head sizes of N vectors are kept in registers; N = 0 stands for any size.
template <int N>
void score_all(const float* query, const float* keys, int64_t first, int64_t end, int64_t size, float* scores) {
  if constexpr (N > 0) {
    vfloat q[N];
    for (int n = 0; n < N; ++n) q[n] = load(query + n * LANES);
    for (int64_t i = first; i < end; ++i) {
      vfloat total = {};
      for (int n = 0; n < N; ++n) total += q[n] * load(keys + i * N * LANES + n * LANES);
      scores[i] = sum(total);
    }
  } else {
    for (int64_t i = first; i < end; ++i) {
      const float* key = keys + i * size;
      vfloat total = {};
      int64_t d = 0;
      for (; d + LANES <= size; d += LANES) total += load(query + d) * load(key + d);
      float result = sum(total);
      for (; d < size; ++d) result += query[d] * key[d];
      scores[i] = result;
    }
  }
}

template <int N>
void add_all(const float* weights, const float* values, int64_t first, int64_t end, int64_t size, float* sums) {
  if constexpr (N > 0) {
    vfloat total[N];
    for (int n = 0; n < N; ++n) total[n] = load(sums + n * LANES);
    for (int64_t i = first; i < end; ++i)
      for (int n = 0; n < N; ++n) total[n] += weights[i] * load(values + i * N * LANES + n * LANES);
    for (int n = 0; n < N; ++n) store(sums + n * LANES, total[n]);
  } else {
    for (int64_t i = first; i < end; ++i) {
      const float* value = values + i * size;
      int64_t d = 0;
      for (; d + LANES <= size; d += LANES) store(sums + d, load(sums + d) + weights[i] * load(value + d));
      for (; d < size; ++d) sums[d] += weights[i] * value[d];
    }
  }
}

inline void scale_by(float* to, float factor, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] *= factor;
}

template <class Value>
void widen_row(const Value* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widen(from[i]);
}

// What a row has gathered so far: the largest score, the sum of exponentials and the sum of values, both relative to it.
struct Row {
  float largest = NOTHING, total = 0;
  float* values;
};

template <int N>
void take_scores(Row& row, float* scores, int64_t first, int64_t end, const float* values, int64_t size) {
  float top = row.largest;
  for (int64_t i = first; i < end; ++i) top = std::max(top, scores[i]);
  if (top != row.largest) {
    const float factor = row.largest == NOTHING ? 0.0f : std::exp(row.largest - top);
    row.total *= factor;
    scale_by(row.values, factor, size);
    row.largest = top;
  }
  for (int64_t i = 0; i < SPAN; ++i) scores[i] = i >= first && i < end ? scores[i] - top : NOTHING;
  vfloat sums = {};
  for (int64_t i = 0; i < SPAN; i += LANES) {
    const vfloat weights = exponential(load(scores + i));
    store(scores + i, weights);
    sums += weights;
  }
  row.total += sum(sums);
  add_all<N>(scores, values, first, end, size, row.values);
}

template <class Value>
void read_span(const Task& task, const Tile& tile, int64_t begin, int64_t end, float* keys, float* values) {
  const Attention& shape = task.shape;
  const int64_t size = shape.head_dim, slot_size = shape.kv_heads * size;
  const int32_t* table = task.sequences.block_tables + tile.sequence * task.sequences.max_blocks;
  for (int64_t position = begin; position < end; ++position) {
    const int64_t slot = int64_t(table[position / shape.block_size]) * shape.block_size + position % shape.block_size;
    const int64_t at = slot * slot_size + tile.kv_head * size;
    widen_row(static_cast<const Value*>(task.keys) + at, size, keys + (position - begin) * size);
    widen_row(static_cast<const Value*>(task.values) + at, size, values + (position - begin) * size);
  }
}

template <int N>
void score(const Attention& shape, const float* query, const float* keys, int64_t first, int64_t end, float* scores) {
  score_all<N>(query, keys, first, end, shape.head_dim, scores);
  for (int64_t i = first; i < end; ++i) scores[i] *= shape.scale;
  if (shape.soft_cap == 0) return;
  for (int64_t i = first; i < end; ++i) scores[i] = shape.soft_cap * std::tanh(scores[i] / shape.soft_cap);
}

int64_t oldest_seen(const Attention& shape, int64_t position) {
  return shape.window && position + 1 > shape.window ? position + 1 - shape.window : 0;
}

template <int N, class Value>
void attend_tile(const Task& task, const Tile& tile) {
  const Attention& shape = task.shape;
  const int64_t size = shape.head_dim, group = shape.heads / shape.kv_heads, rows = tile.num_rows * group;
  thread_local std::vector<float> memory;
  memory.resize(size_t((2 * SPAN + rows) * size + SPAN));
  float* keys = memory.data();
  float* values = keys + SPAN * size;
  float* sums = values + SPAN * size;
  float* scores = sums + rows * size;
  std::vector<Row> state(static_cast<size_t>(rows));
  std::fill(sums, sums + rows * size, 0.0f);
  for (int64_t r = 0; r < rows; ++r) state[size_t(r)].values = sums + r * size;

  const int64_t last = tile.first_position + tile.num_rows - 1;
  for (int64_t begin = oldest_seen(shape, tile.first_position) / SPAN * SPAN; begin <= last; begin += SPAN) {
    // Slots that nobody sees are not read: those before the window may be another sequence's by now.
    const int64_t oldest = std::max(begin, oldest_seen(shape, tile.first_position));
    const int64_t end = std::min(begin + SPAN, last + 1);
    read_span<Value>(task, tile, oldest, end, keys + (oldest - begin) * size, values + (oldest - begin) * size);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = r / group, position = tile.first_position + token;
      const int64_t from = std::max(oldest, oldest_seen(shape, position)), to = std::min(end, position + 1);
      if (from >= to) continue;
      const float* query = task.query + (tile.first_row + token) * task.stride + (tile.kv_head * group + r % group) * size;
      score<N>(shape, query, keys, from - begin, to - begin, scores);
      take_scores<N>(state[size_t(r)], scores, from - begin, to - begin, values, size);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* y = task.y + ((tile.first_row + r / group) * shape.heads + tile.kv_head * group + r % group) * size;
    const float inverse = 1.0f / state[size_t(r)].total;
    for (int64_t i = 0; i < size; ++i) y[i] = sums[r * size + i] * inverse;
  }
}

std::vector<Tile> tiles_of(const Attention& shape, const Sequences& sequences) {
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < sequences.count; ++s) {
    const int64_t begin = sequences.query_starts[s], end = sequences.query_starts[s + 1];
    for (int64_t row = begin; row < end; row += TILE_TOKENS) {
      const int64_t count = std::min(TILE_TOKENS, end - row);
      const int64_t position = sequences.context_lengths[s] - (end - row);
      for (int64_t head = 0; head < shape.kv_heads; ++head) tiles.push_back({s, head, row, count, position});
    }
  }
  return tiles;
}

template <class Value>
auto attend_tile_of(int64_t head_dim) {
  if (head_dim == 4 * LANES) return attend_tile<4, Value>;
  if (head_dim == 8 * LANES) return attend_tile<8, Value>;
  if (head_dim == 16 * LANES) return attend_tile<16, Value>;
  return attend_tile<0, Value>;
}

}  // namespace

void attend(Pool& pool, const Attention& shape, Dtype dtype, const float* query, int64_t stride, const void* key_cache,
            const void* value_cache, const Sequences& sequences, float* y) {
  const Task task{shape, query, stride, key_cache, value_cache, sequences, y};
  const std::vector<Tile> tiles = tiles_of(shape, sequences);
  const auto attend_one = dtype == Dtype::float32 ? attend_tile_of<float>(shape.head_dim)
                                                   : attend_tile_of<bfloat16>(shape.head_dim);
  pool.run(int64_t(tiles.size()), [&](int64_t chunk, int) { attend_one(task, tiles[size_t(chunk)]); });
}

}  // namespace suimon
