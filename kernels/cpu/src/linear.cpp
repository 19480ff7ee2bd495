#include "linear.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "vector.h"

namespace suimon {

namespace {

// One column of a panel: 16 rows of the weight. Compilers split it where registers are narrower.
typedef float column __attribute__((vector_size(64)));
typedef uint32_t column_bits __attribute__((vector_size(64)));
typedef uint16_t column_halves __attribute__((vector_size(32)));

// Rows of x that share what is read of the weight: as many sums as the registers hold, beside what feeds them.
#if defined(__AVX512F__)
constexpr int MOST_TOKENS = 12, PANELS_OF_MANY = 2, PANELS_OF_FEW = 4;
#else
constexpr int MOST_TOKENS = 6, PANELS_OF_MANY = 1, PANELS_OF_FEW = 2;
#endif
// With few rows of x there are sums to spare: more panels at a time hide the latency of an addition.
constexpr int FEW_TOKENS = 5;
// Weight bytes of a chunk: small enough to share out evenly, large enough that claiming it costs nothing.
constexpr int64_t CHUNK_BYTES = 64 << 10;

inline column load_column(const float* from) {
  column result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

inline column load_column(const bfloat16* from) {
  column_halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (column)(__builtin_convertvector(halves, column_bits) << 16);
}

struct Output {
  float* y;
  int64_t stride, out;
  const float* bias;
  bool add;

  void put(int64_t token, int64_t row, column sums) const {
    float* place = y + token * stride + row;
    const size_t bytes = size_t(std::min(PANEL, out - row)) * sizeof(float);
    if (bytes == sizeof(column)) {
      if (bias) sums += load_column(bias + row);
      if (add) sums += load_column(place);
    } else {
      column extra = {};
      if (bias) std::memcpy(&extra, bias + row, bytes), sums += extra;
      if (add) std::memcpy(&extra, place, bytes), sums += extra;
    }
    std::memcpy(place, &sums, bytes);
  }
};

// P panels, the first of which is number `panel`, times M rows of x, from row `token`.
template <int P, int M, class Weight>
void tile(const Weight* weight, int64_t in, const float* x, int64_t token, int64_t panel, const Output& output) {
  column sums[P][M] = {};
  const float* inputs = x + token * in;
  const int64_t panel_size = in * PANEL;
  for (int64_t k = 0; k < in; ++k) {
    column w[P];
    for (int p = 0; p < P; ++p) w[p] = load_column(weight + p * panel_size + k * PANEL);
    for (int m = 0; m < M; ++m)
      for (int p = 0; p < P; ++p) sums[p][m] += w[p] * inputs[m * in + k];
  }
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < P; ++p) output.put(token + m, (panel + p) * PANEL, sums[p][m]);
}

template <class Weight>
using Tile = void (*)(const Weight*, int64_t, const float*, int64_t, int64_t, const Output&);

template <int P, class Weight, size_t... M>
constexpr auto tiles_by_tokens(std::index_sequence<M...>) {
  return std::array<Tile<Weight>, sizeof...(M)>{tile<P, int(M) + 1, Weight>...};
}

// All rows of x, in parts of like size.
template <int P, class Weight>
void tiles(const Weight* weight, int64_t in, const float* x, int64_t T, int64_t panel, const Output& output) {
  constexpr size_t most = P == PANELS_OF_FEW ? FEW_TOKENS - 1 : MOST_TOKENS;
  static constexpr auto table = tiles_by_tokens<P, Weight>(std::make_index_sequence<most>());
  const int64_t parts = (T + int64_t(most) - 1) / int64_t(most);
  for (int64_t part = 0, token = 0; part < parts; ++part) {
    const int64_t end = T * (part + 1) / parts;
    table[size_t(end - token - 1)](weight, in, x, token, panel, output);
    token = end;
  }
}

template <class Weight>
void product(Pool& pool, const Linear& layer, const float* x, int64_t T, const Output& output) {
  const int64_t in = layer.in, panel_size = in * PANEL, all = panels_of(layer.out);
  const int64_t together = T < FEW_TOKENS ? PANELS_OF_FEW : PANELS_OF_MANY;
  const int64_t affordable = CHUNK_BYTES / (panel_size * int64_t(sizeof(Weight))) / together * together;
  const int64_t count = std::max(together, affordable);
  const Weight* weight = static_cast<const Weight*>(layer.weight);
  pool.run((all + count - 1) / count, [&](int64_t chunk, int) {
    int64_t panel = chunk * count;
    const int64_t end = std::min(all, panel + count);
    if (T < FEW_TOKENS)
      for (; panel + PANELS_OF_FEW <= end; panel += PANELS_OF_FEW)
        tiles<PANELS_OF_FEW>(weight + panel * panel_size, in, x, T, panel, output);
    if constexpr (PANELS_OF_MANY > 1)
      for (; panel + PANELS_OF_MANY <= end; panel += PANELS_OF_MANY)
        tiles<PANELS_OF_MANY>(weight + panel * panel_size, in, x, T, panel, output);
    for (; panel < end; ++panel) tiles<1>(weight + panel * panel_size, in, x, T, panel, output);
  });
}

template <class Weight>
void pack_panel(const Weight* rows, int64_t count, int64_t in, Weight* panel) {
  for (int64_t k = 0; k < in; ++k)
    for (int64_t row = 0; row < PANEL; ++row) panel[k * PANEL + row] = row < count ? rows[row * in + k] : Weight{};
}

template <class Weight>
void pack_as(Pool& pool, const void* weight, int64_t out, int64_t in, void* packed) {
  pool.run(panels_of(out), [&](int64_t panel, int) {
    const int64_t row = panel * PANEL;
    pack_panel(static_cast<const Weight*>(weight) + row * in, std::min(PANEL, out - row), in,
               static_cast<Weight*>(packed) + row * in);
  });
}

}  // namespace

void pack(Pool& pool, Dtype dtype, const void* weight, int64_t out, int64_t in, void* packed) {
  if (dtype == Dtype::float32)
    pack_as<float>(pool, weight, out, in, packed);
  else
    pack_as<bfloat16>(pool, weight, out, in, packed);
}

void linear(Pool& pool, const Linear& layer, Dtype dtype, const float* x, int64_t T, float* y, int64_t stride, bool add) {
  const Output output{y, stride, layer.out, layer.bias, add};
  if (dtype == Dtype::float32)
    product<float>(pool, layer, x, T, output);
  else
    product<bfloat16>(pool, layer, x, T, output);
}

}  // namespace suimon
