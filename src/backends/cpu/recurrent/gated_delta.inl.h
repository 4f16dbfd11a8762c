// The kernel of gated_delta.h, in the vector operations of one simd_*.h. Included after it inside
// its namespace.
//
// A row reads the state as the row before it leaves it, and both products with the state are taken
// before the row's own update: S'^T q = decay S^T q + (k . q) delta. So the update by a row and the
// products for the next one are one pass over the state, which stays in L2.
#pragma once
#include "backends/cpu/simd/activation.inl.h"
#include "backends/cpu/simd/conversions.inl.h"

/// Vectors of a row of the state that a pass keeps in registers.
inline constexpr int kDeltaTile = kLanes == 8 ? 2 : 4;

MARLIN_SIMD_INLINE int64_t Padded(int64_t count) {
  return (count + kDeltaPad - 1) / kDeltaPad * kDeltaPad;
}

/// The first `count` lanes; the others are zeros.
MARLIN_SIMD_INLINE F LoadFirst(const float* p, int64_t count) {
  if (count >= kLanes) return Load(p);
  alignas(64) float lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
  return Load(lanes);
}

MARLIN_SIMD_INLINE void StoreFirst(float* p, int64_t count, F v) {
  if (count >= kLanes) return Store(p, v);
  alignas(64) float lanes[kLanes];
  Store(lanes, v);
  __builtin_memcpy(p, lanes, static_cast<size_t>(count) * sizeof(float));
}

/// The dot product of padded vectors.
static float Dot(const float* a, const float* b, int64_t padded) {
  F sums[2] = {Zero(), Zero()};
  int64_t i = 0;
  for (; i + 2 * kLanes <= padded; i += 2 * kLanes) {
    sums[0] = Fma(Load(a + i), Load(b + i), sums[0]);
    sums[1] = Fma(Load(a + i + kLanes), Load(b + i + kLanes), sums[1]);
  }
  for (; i < padded; i += kLanes) sums[0] = Fma(Load(a + i), Load(b + i), sums[0]);
  return Sum(Add(sums[0], sums[1]));
}

/// One pass over the state [key_dim, value_dim]: its update by a row, and then its products with
/// the key and the query of the next row.
struct StatePass {
  const float* from;
  float* to;
  int64_t key_dim;
  int64_t value_dim;
  const float* key;
  const float* delta;
  float decay;
  const float* next_key;
  const float* next_query;
  float* by_key;    ///< S^T next_key
  float* by_query;  ///< S^T next_query
};

template <int kTile, bool kUpdates, bool kMultiplies>
MARLIN_SIMD_INLINE void PassColumns(const StatePass& pass, int64_t column) {
  const int64_t rest = pass.value_dim - column;  // Only a last vector is not full.
  const F decay = Set(pass.decay);
  F delta[kTile];
  F by_key[kTile];
  F by_query[kTile];
  for (int c = 0; c < kTile; ++c) {
    if constexpr (kUpdates) delta[c] = Load(pass.delta + column + c * kLanes);
    by_key[c] = Zero();
    by_query[c] = Zero();
  }
  for (int64_t i = 0; i < pass.key_dim; ++i) {
    const int64_t at = i * pass.value_dim + column;
    for (int c = 0; c < kTile; ++c) {
      const int64_t lanes = kTile > 1 ? kLanes : rest;
      F s = LoadFirst(pass.from + at + c * kLanes, lanes);
      if constexpr (kUpdates) {
        s = Fma(Set(pass.key[i]), delta[c], Mul(decay, s));
        StoreFirst(pass.to + at + c * kLanes, lanes, s);
      }
      if constexpr (kMultiplies) {
        by_key[c] = Fma(s, Set(pass.next_key[i]), by_key[c]);
        by_query[c] = Fma(s, Set(pass.next_query[i]), by_query[c]);
      }
    }
  }
  if constexpr (kMultiplies) {
    for (int c = 0; c < kTile; ++c) {
      Store(pass.by_key + column + c * kLanes, by_key[c]);
      Store(pass.by_query + column + c * kLanes, by_query[c]);
    }
  }
}

template <bool kUpdates, bool kMultiplies>
static void PassState(const StatePass& pass) {
  int64_t column = 0;
  for (; column + kDeltaTile * kLanes <= pass.value_dim; column += kDeltaTile * kLanes) {
    PassColumns<kDeltaTile, kUpdates, kMultiplies>(pass, column);
  }
  for (; column < pass.value_dim; column += kLanes) {
    PassColumns<1, kUpdates, kMultiplies>(pass, column);
  }
}

/// A row's part of the state update, in padded vectors.
struct DeltaRow {
  float* query;
  float* key;
  float* value;
  float query_key;  ///< query . key
  float decay;
  float write;
};

class DeltaRunner {
 public:
  explicit DeltaRunner(const DeltaHead& head)
      : head_(head),
        keys_(Padded(head.keys.count)),
        values_(Padded(head.values.count)),
        next_(head.scratch),
        rate_(__builtin_expf(head.log_decay)) {
    query_weights_ = Transposed(head.queries, keys_);
    key_weights_ = Transposed(head.keys, keys_);
    value_weights_ = Transposed(head.values, values_);
    for (DeltaRow& row : row_) row = {Take(keys_), Take(keys_), Take(values_), 0, 0, 0};
    by_key_ = Take(values_);
    by_query_ = Take(values_);
    delta_ = Take(values_);
    mixed_ = Take(values_);
    gate_ = Take(values_);
    norm_ = Take(values_);
    for (int64_t i = 0; i < head.values.count; ++i) norm_[i] = head.norm[i];
  }

  void Run() {
    StatePass pass{};
    pass.key_dim = head_.keys.count;
    pass.value_dim = head_.values.count;
    pass.by_key = by_key_;
    pass.by_query = by_query_;
    pass.delta = delta_;
    pass.from = First();
    pass.to = head_.state_after;
    Prepare(0, &row_[0]);
    pass.next_key = row_[0].key;
    pass.next_query = row_[0].query;
    PassState<false, true>(pass);
    for (int64_t t = 0; t < head_.count; ++t) {
      const DeltaRow& row = row_[t % 2];
      Mix(row);
      Write(head_.rows[t]);
      pass.key = row.key;
      pass.decay = row.decay;
      if (t + 1 == head_.count) {
        PassState<true, false>(pass);
        break;
      }
      DeltaRow& next = row_[(t + 1) % 2];
      Prepare(t + 1, &next);
      pass.next_key = next.key;
      pass.next_query = next.query;
      PassState<true, true>(pass);
      pass.from = head_.state_after;
    }
  }

 private:
  float* Take(int64_t count) {
    float* const taken = next_;
    next_ += count;
    for (int64_t i = 0; i < count; ++i) taken[i] = 0.0f;
    return taken;
  }

  /// [width, padded]
  float* Transposed(const DeltaChannels& channels, int64_t padded) {
    float* const out = Take(head_.width * padded);
    for (int64_t c = 0; c < channels.count; ++c) {
      for (int64_t tap = 0; tap < head_.width; ++tap) {
        out[tap * padded + c] = channels.weights[c * head_.width + tap];
      }
    }
    return out;
  }

  const float* First() const {
    if (head_.state_before != nullptr) return head_.state_before;
    const int64_t count = head_.keys.count * head_.values.count;
    for (int64_t i = 0; i < count; ++i) head_.state_after[i] = 0.0f;
    return head_.state_after;
  }

  /// SiLU of the convolution at the row `t` of those that take part.
  void Convolve(const DeltaChannels& channels, const float* weights, int64_t padded, int64_t t,
                float* out) const {
    const int64_t width = head_.width;
    for (int64_t c = 0; c < padded; c += kLanes) Store(out + c, Zero());
    for (int64_t tap = 0; tap < width; ++tap) {
      const int64_t row = t - (width - 1) + tap;
      const float* x = channels.before;
      if (row >= 0) {
        x = channels.rows + head_.rows[row] * channels.stride;
      } else if (x != nullptr) {
        x += (row + width - 1) * head_.channels;
      } else {
        continue;
      }
      const float* const w = weights + tap * padded;
      for (int64_t c = 0; c < channels.count; c += kLanes) {
        Store(out + c, Fma(LoadFirst(x + c, channels.count - c), Load(w + c), Load(out + c)));
      }
    }
    Activate(Activation::kSilu, out, channels.count);
  }

  static void ScaleBy(float factor, int64_t padded, float* x) {
    for (int64_t i = 0; i < padded; i += kLanes) Store(x + i, Mul(Set(factor), Load(x + i)));
  }

  void Prepare(int64_t t, DeltaRow* row) const {
    Convolve(head_.queries, query_weights_, keys_, t, row->query);
    Convolve(head_.keys, key_weights_, keys_, t, row->key);
    Convolve(head_.values, value_weights_, values_, t, row->value);
    const auto norm = [&](const float* x) {
      return 1.0f / __builtin_sqrtf(Dot(x, x, keys_) + 1e-6f);
    };
    const auto depth = static_cast<float>(head_.keys.count);
    ScaleBy(norm(row->query) / __builtin_sqrtf(depth), keys_, row->query);
    ScaleBy(norm(row->key), keys_, row->key);
    row->query_key = Dot(row->query, row->key, keys_);
    const int64_t at = head_.rows[t];
    const float a = *head_.decays.At(at) + head_.decay_bias;
    // The logarithm of 1 + e^a, which above 20 is a in fp32.
    const float soft = a > 20.0f ? a : __builtin_log1pf(__builtin_expf(a));
    row->decay = __builtin_expf(-rate_ * soft);
    row->write = 1.0f / (1.0f + __builtin_expf(-*head_.writes.At(at)));
  }

  /// From the products with the state before the row: what the row writes, and its result.
  void Mix(const DeltaRow& row) {
    const F decay = Set(row.decay);
    for (int64_t i = 0; i < values_; i += kLanes) {
      const F kept = Mul(decay, Load(by_key_ + i));
      const F delta = Mul(Set(row.write), Sub(Load(row.value + i), kept));
      Store(delta_ + i, delta);
      Store(mixed_ + i, Fma(Set(row.query_key), delta, Mul(decay, Load(by_query_ + i))));
    }
  }

  /// The gated norm.
  void Write(int64_t row) {
    const int64_t count = head_.values.count;
    Widen(head_.gates.At(row), DType::kF32, count, gate_);
    Activate(Activation::kSilu, gate_, count);
    const float mean = Dot(mixed_, mixed_, values_) / static_cast<float>(count);
    const F factor = Set(1.0f / __builtin_sqrtf(mean + head_.epsilon));
    for (int64_t i = 0; i < values_; i += kLanes) {
      const F normed = Mul(Mul(Load(mixed_ + i), factor), Load(norm_ + i));
      Store(mixed_ + i, Mul(normed, Load(gate_ + i)));
    }
    Narrow(mixed_, count, head_.out_type, head_.out + row * head_.out_stride);
  }

  const DeltaHead& head_;
  int64_t keys_;
  int64_t values_;
  float* next_;
  float rate_;
  float* query_weights_;
  float* key_weights_;
  float* value_weights_;
  DeltaRow row_[2];
  float* by_key_;
  float* by_query_;
  float* delta_;
  float* mixed_;
  float* gate_;
  float* norm_;
};

void RunDeltaHead(const DeltaHead& head) { DeltaRunner(head).Run(); }
