#include "decoder.h"

#include <algorithm>

#include "vector.h"

namespace suimon {

namespace {

// Rows below which the small operations between products are done by the caller: waking another thread takes longer.
constexpr int64_t FEW_ROWS = 3;

class Pass {
 public:
  Pass(Pool& pool, const Decoder& decoder, const Step& step) : pool_(pool), decoder_(decoder), step_(step) {
    const int64_t T = step.num_tokens;
    qkv_width_ = (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim;
    attended_width_ = decoder.heads * decoder.head_dim;
    normed_.resize(size_t(T * decoder.hidden));
    added_.resize(size_t(T * decoder.hidden));
    qkv_.resize(size_t(T * qkv_width_));
    attended_.resize(size_t(T * attended_width_));
    gates_.resize(size_t(T * 2 * decoder.intermediate));
    gated_.resize(size_t(T * decoder.intermediate));
  }

  void run() {
    for (int64_t index = 0; index < decoder_.num_layers; ++index) {
      const Layer& layer = decoder_.layers[index];
      norm(step_.hidden, layer.input_norm, normed_.data());
      product(layer.qkv, normed_.data(), qkv_.data(), qkv_width_);
      prepare_heads(layer, index);
      attend_to_cache(layer, index);
      add_to_stream(layer.output, attended_.data(), layer.post_attention_norm);
      norm(step_.hidden, layer.mlp_norm, normed_.data());
      product(layer.gate_up, normed_.data(), gates_.data(), 2 * decoder_.intermediate);
      gate_all();
      add_to_stream(layer.down, gated_.data(), layer.post_mlp_norm);
    }
    norm(step_.hidden, decoder_.final_norm, step_.hidden);
  }

 private:
  template <class Body>
  void for_rows(const Body& body) {
    const int64_t T = step_.num_tokens;
    if (T < FEW_ROWS) {
      for (int64_t row = 0; row < T; ++row) body(row);
      return;
    }
    pool_.run(T, [&](int64_t row, int) { body(row); });
  }

  void product(const Linear& layer, const float* x, float* y, int64_t stride, bool add = false) {
    linear(pool_, layer, decoder_.dtype, x, step_.num_tokens, y, stride, add);
  }

  void norm(const float* x, const float* weight, float* y) {
    const int64_t size = decoder_.hidden;
    for_rows([&](int64_t row) { rms_norm(x + row * size, weight, decoder_.eps, size, y + row * size); });
  }

  // Norm and rotate queries and keys, and store keys and values in the cache.
  void prepare_heads(const Layer& layer, int64_t index) {
    for_rows([&](int64_t row) {
      prepare_row(layer, row);
      if (decoder_.dtype == Dtype::float32)
        store_row<float>(index, row);
      else
        store_row<bfloat16>(index, row);
    });
  }

  void prepare_row(const Layer& layer, int64_t row) {
    const int64_t D = decoder_.head_dim, R = decoder_.rotary_dim, H = decoder_.heads;
    for (int64_t head = 0; head < H + decoder_.kv_heads; ++head) {
      float* features = qkv_.data() + row * qkv_width_ + head * D;
      const float* weight = head < H ? layer.query_norm : layer.key_norm;
      if (weight) rms_norm(features, weight, decoder_.eps, D, features);
      rotate(features, step_.cos[layer.rope] + row * R, step_.sin[layer.rope] + row * R, R);
    }
  }

  template <class Value>
  void store_row(int64_t index, int64_t row) {
    const int64_t size = decoder_.kv_heads * decoder_.head_dim;
    const float* keys = qkv_.data() + row * qkv_width_ + attended_width_;
    Value* key_slot = static_cast<Value*>(step_.key_caches[index]) + step_.slots[row] * size;
    Value* value_slot = static_cast<Value*>(step_.value_caches[index]) + step_.slots[row] * size;
    for (int64_t i = 0; i < size; ++i) narrow(keys[i], key_slot[i]);
    for (int64_t i = 0; i < size; ++i) narrow(keys[size + i], value_slot[i]);
  }

  void attend_to_cache(const Layer& layer, int64_t index) {
    const Attention shape{decoder_.heads, decoder_.kv_heads, decoder_.head_dim, decoder_.block_size,
                          layer.window,   decoder_.scale,    decoder_.soft_cap};
    attend(pool_, shape, decoder_.dtype, qkv_.data(), qkv_width_, step_.key_caches[index], step_.value_caches[index],
           step_.sequences, attended_.data());
  }

  void gate_all() {
    const int64_t I = decoder_.intermediate;
    for_rows([&](int64_t row) {
      const float* gates = gates_.data() + row * 2 * I;
      gate(gates, gates + I, decoder_.activation, I, gated_.data() + row * I);
    });
  }

  // Add a product, normed first if the family does that, to the residual stream.
  void add_to_stream(const Linear& layer, const float* x, const float* norm_weight) {
    const int64_t size = decoder_.hidden;
    if (!norm_weight) return product(layer, x, step_.hidden, size, true);
    product(layer, x, added_.data(), size);
    norm(added_.data(), norm_weight, added_.data());
    for_rows([&](int64_t row) {
      for (int64_t i = row * size; i < (row + 1) * size; ++i) step_.hidden[i] += added_[size_t(i)];
    });
  }

  Pool& pool_;
  const Decoder& decoder_;
  const Step& step_;
  int64_t qkv_width_, attended_width_;
  std::vector<float> normed_, added_, qkv_, attended_, gates_, gated_;
};

}  // namespace

void decode(Pool& pool, const Decoder& decoder, const Step& step) { Pass(pool, decoder, step).run(); }

}  // namespace suimon
