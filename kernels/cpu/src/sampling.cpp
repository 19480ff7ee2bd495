#include "sampling.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "vector.h"

namespace suimon {

namespace {

constexpr int64_t BLOCK = 64;      // entries whose largest, or whose sum, is taken together
constexpr int64_t CANDIDATES = 64;  // entries that a top_p row lists first
constexpr float LEAST = -std::numeric_limits<float>::infinity();

// What a thread needs beside the row itself; kept, so that it is not asked of the system for each row.
struct Scratch {
  std::vector<float> maxima, thresholds, weights;
  std::vector<double> sums;
  std::vector<int64_t> ids;
};

// A row of logits with the largest entry of each block. Entries are ordered by logit, and equal ones by the lower id.
struct Row {
  const float* logits;
  int64_t size;
  const SampleRow& wanted;
  Scratch& scratch;
  float best = LEAST;
  bool has_nan = false;

  int64_t blocks() const { return (size + BLOCK - 1) / BLOCK; }
  int64_t end_of(int64_t block) const { return std::min(size, (block + 1) * BLOCK); }
  bool is_before(int64_t a, int64_t b) const { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); }
};

// The random number of (seed, position, draw) in [0, 1): Philox4x32-10 (Salmon et al. 2011), as in uniform_numbers.py.
double uniform(const SampleRow& row, uint32_t draw) {
  uint32_t c0 = uint32_t(row.position), c1 = uint32_t(row.position >> 32), c2 = draw, c3 = 0;
  uint32_t k0 = uint32_t(row.seed), k1 = uint32_t(row.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(c0) * 0xD2511F53u, product1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c0 >> 6) << 26) | (c1 >> 6)) * 0x1p-52;
}

void look_over(Row& row) {
  std::vector<float>& maxima = row.scratch.maxima;
  maxima.resize(size_t(row.blocks()));
  vint nans = {};
  for (int64_t block = 0; block < row.blocks(); ++block) {
    int64_t i = block * BLOCK;
    const int64_t end = row.end_of(block);
    float top = LEAST;
    if (end - i == BLOCK) {
      vfloat tops = load(row.logits + i);
      for (int64_t j = i; j < end; j += LANES) {
        const vfloat values = load(row.logits + j);
        nans |= values != values;
        tops = maximum(tops, values);
      }
      top = largest(tops);
      i = end;
    }
    for (; i < end; ++i) {
      row.has_nan |= row.logits[i] != row.logits[i];
      top = std::max(top, row.logits[i]);
    }
    maxima[size_t(block)] = top;
    row.best = std::max(row.best, top);
  }
  for (int lane = 0; lane < LANES; ++lane) row.has_nan |= nans[lane] != 0;
}

int64_t best_entry(const Row& row) {
  int64_t i = 0;
  while (row.scratch.maxima[size_t(i)] != row.best) ++i;
  i *= BLOCK;
  while (row.logits[i] != row.best) ++i;
  return i;
}

// scratch.ids becomes the `count` best entries, best first. They lie in blocks whose largest entry is one of the `count`
// largest: that many entries are at least as large as the least of those.
void list_best(const Row& row, int64_t count) {
  const std::vector<float>& maxima = row.scratch.maxima;
  std::vector<float>& thresholds = row.scratch.thresholds;
  float threshold = LEAST;
  if (count < row.blocks()) {
    thresholds = maxima;
    std::nth_element(thresholds.begin(), thresholds.begin() + (count - 1), thresholds.end(), std::greater<float>());
    threshold = thresholds[size_t(count - 1)];
  }
  std::vector<int64_t>& ids = row.scratch.ids;
  ids.clear();
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (maxima[size_t(block)] < threshold) continue;
    for (int64_t i = block * BLOCK; i < row.end_of(block); ++i)
      if (row.logits[i] >= threshold) ids.push_back(i);
  }
  const auto before = [&row](int64_t a, int64_t b) { return row.is_before(a, b); };
  const auto middle = ids.begin() + std::min(count, int64_t(ids.size()));
  std::partial_sort(ids.begin(), middle, ids.end(), before);
  ids.erase(middle, ids.end());
}

// exp((logit - best) / temperature) of all entries, and the sum of each block.
void weigh(const Row& row, float least) {
  std::vector<float>& weights = row.scratch.weights;
  std::vector<double>& sums = row.scratch.sums;
  weights.resize(size_t(row.blocks() * BLOCK));
  sums.resize(size_t(row.blocks()));
  const vfloat floor = broadcast(least);
  float last[BLOCK];
  for (int64_t block = 0; block < row.blocks(); ++block) {
    const float* logits = row.logits + block * BLOCK;
    if (row.end_of(block) - block * BLOCK < BLOCK) {
      std::fill(last, last + BLOCK, LEAST);
      std::copy(logits, row.logits + row.size, last);
      logits = last;
    }
    vfloat total = {};
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      vfloat weight = exponential((load(logits + i) - row.best) / row.wanted.temperature);
      weight = weight < floor ? vfloat{} : weight;
      store(weights.data() + block * BLOCK + i, weight);
      total += weight;
    }
    sums[size_t(block)] = sum(total);
  }
}

double total_of(const std::vector<double>& sums) {
  double total = 0;
  for (const double value : sums) total += value;
  return total;
}

// The index at which the cumulative weight passes u times the whole, never one of weight zero; `rest` is how far into
// its share that lies (Devroye 1986, ch. III.2).
template <class Weight>
int64_t invert(const Weight* weights, int64_t count, double u, double& rest) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += double(weights[i]);
  const double target = u * total;
  double before = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double weight = double(weights[i]);
    if (weight <= 0) continue;
    last = i;
    if (before + weight > target) {
      rest = std::clamp((target - before) / weight, 0.0, 1.0);
      return i;
    }
    before += weight;
  }
  rest = 1;
  return last;
}

int64_t draw_everywhere(const Row& row, double u) {
  double rest, unused;
  const int64_t block = invert(row.scratch.sums.data(), row.blocks(), u, rest);
  return block * BLOCK + invert(row.scratch.weights.data() + block * BLOCK, BLOCK, rest, unused);
}

// Weights of what does not come before `pivot` become zero.
void keep_better(const Row& row, int64_t pivot) {
  const float bound = row.logits[pivot];
  // Of equal entries, those before the pivot are better: there the bound is the largest number below it.
  const vfloat behind = broadcast(bound), ahead = broadcast(std::nextafter(bound, LEAST));
  for (int64_t block = 0; block < row.blocks(); ++block) {
    double& total = row.scratch.sums[size_t(block)];
    float* weights = row.scratch.weights.data() + block * BLOCK;
    const float* logits = row.logits + block * BLOCK;
    const int64_t start = block * BLOCK, end = row.end_of(block);
    if (row.scratch.maxima[size_t(block)] < bound) {
      std::fill(weights, weights + BLOCK, 0.0f);
      total = 0;
    } else if (end - start == BLOCK && (pivot < start || pivot >= end)) {
      const vfloat least = pivot < start ? behind : ahead;
      vfloat kept = {};
      for (int64_t i = 0; i < BLOCK; i += LANES) {
        const vfloat weight = load(logits + i) > least ? load(weights + i) : vfloat{};
        store(weights + i, weight);
        kept += weight;
      }
      total = sum(kept);
    } else {
      total = 0;
      for (int64_t i = start; i < end; ++i) {
        if (!row.is_before(i, pivot)) weights[i - start] = 0;
        total += weights[i - start];
      }
    }
  }
}

// From the smallest set of best entries that weighs `mass`, without listing it: rejection with a rising pivot, as in
// FlashInfer (Ye et al. 2025). All entries are weighed.
int64_t draw_from_nucleus(const Row& row, double mass) {
  if (row.wanted.min_p > 0) weigh(row, row.wanted.min_p);
  for (uint32_t draw = 1;; ++draw) {
    const int64_t drawn = draw_everywhere(row, uniform(row.wanted, draw));
    keep_better(row, drawn);
    if (total_of(row.scratch.sums) < mass) return drawn;
  }
}

// From a list of best entries: all of top_k, or as many as hold most nuclei.
int64_t draw_from_list(const Row& row) {
  const SampleRow& wanted = row.wanted;
  const bool is_limited = wanted.top_k > 0 && wanted.top_k < row.size;
  list_best(row, std::min(is_limited ? wanted.top_k : CANDIDATES, row.size));
  const std::vector<int64_t>& ids = row.scratch.ids;
  std::vector<double> weights(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) weights[i] = std::exp((row.logits[ids[i]] - row.best) / wanted.temperature);
  double mass = std::numeric_limits<double>::infinity();
  if (wanted.top_p < 1) {
    if (!is_limited) weigh(row, 0);
    mass = wanted.top_p * (is_limited ? total_of(weights) : total_of(row.scratch.sums));
  }
  double better = 0;
  size_t length = 0;
  for (; length < weights.size() && (length == 0 || better < mass); ++length) better += weights[length];
  if (!is_limited && length == weights.size()) return draw_from_nucleus(row, mass);
  for (size_t i = 0; i < length; ++i) weights[i] = weights[i] < wanted.min_p ? 0 : weights[i];
  double rest;
  return ids[size_t(invert(weights.data(), int64_t(length), uniform(wanted, 0), rest))];
}

int64_t choose(const Row& row) {
  const SampleRow& wanted = row.wanted;
  if (wanted.temperature == 0 || wanted.top_k == 1) return best_entry(row);
  if (wanted.top_p < 1 || (wanted.top_k > 0 && wanted.top_k < row.size)) return draw_from_list(row);
  weigh(row, wanted.min_p);
  return draw_everywhere(row, uniform(wanted, 0));
}

}  // namespace

void sample(Pool& pool, const float* logits, int64_t count, int64_t size, int64_t stride, const SampleRow* rows,
            int64_t* tokens, uint8_t* is_finite) {
  pool.run(count, [&](int64_t i, int) {
    thread_local Scratch scratch;
    Row row{logits + i * stride, size, rows[i], scratch};
    look_over(row);
    is_finite[i] = !row.has_nan && std::abs(row.best) < std::numeric_limits<float>::infinity();
    tokens[i] = is_finite[i] ? choose(row) : 0;
  });
}

}  // namespace suimon
