// Parts that the kernels of recurrent_kernels.h share, in the vector operations of one simd_*.h:
// causal convolutions, passes over states, and the gated norm. Included after it inside its
// namespace.
#pragma once
#include "backends/cpu/simd/activation.inl.h"
#include "backends/cpu/simd/conversions.inl.h"

/// Vectors of a row of the state that a pass keeps in registers.
inline constexpr int kStateTile = kLanes == 8 ? 2 : 4;

MARLIN_SIMD_INLINE int64_t Padded(int64_t count) {
  return (count + kRecurrentPad - 1) / kRecurrentPad * kRecurrentPad;
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

/// One pass over a state [key_dim, value_dim]: its update S = decay S + key delta^T, and then its
/// products with another key and query.
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

/// The parts of a pass.
enum class PassKind { kProducts, kUpdate, kUpdateAndProducts, kUpdateAndQuery };

template <int kTile, PassKind kKind>
MARLIN_SIMD_INLINE void PassColumns(const StatePass& pass, int64_t column) {
  constexpr bool kUpdates = kKind != PassKind::kProducts;
  constexpr bool kReadsKey = kKind == PassKind::kProducts || kKind == PassKind::kUpdateAndProducts;
  constexpr bool kReadsQuery = kKind != PassKind::kUpdate;
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
      if constexpr (kReadsKey) by_key[c] = Fma(s, Set(pass.next_key[i]), by_key[c]);
      if constexpr (kReadsQuery) by_query[c] = Fma(s, Set(pass.next_query[i]), by_query[c]);
    }
  }
  for (int c = 0; c < kTile; ++c) {
    if constexpr (kReadsKey) Store(pass.by_key + column + c * kLanes, by_key[c]);
    if constexpr (kReadsQuery) Store(pass.by_query + column + c * kLanes, by_query[c]);
  }
}

template <PassKind kKind>
static void PassState(const StatePass& pass) {
  int64_t column = 0;
  for (; column + kStateTile * kLanes <= pass.value_dim; column += kStateTile * kLanes) {
    PassColumns<kStateTile, kKind>(pass, column);
  }
  for (; column < pass.value_dim; column += kLanes) {
    PassColumns<1, kKind>(pass, column);
  }
}

/// Zero-padded vectors of a task, one after another in its scratch.
class ScratchVectors {
 public:
  explicit ScratchVectors(float* scratch) : next_(scratch) {}

  float* Take(int64_t count) {
    float* const taken = next_;
    next_ += count;
    for (int64_t i = 0; i < count; ++i) taken[i] = 0.0f;
    return taken;
  }
  float* Copy(const float* from, int64_t count, int64_t padded) {
    float* const out = Take(padded);
    for (int64_t i = 0; i < count; ++i) out[i] = from[i];
    return out;
  }
  /// The weights [count, width] of channels as [width, padded].
  float* Transpose(const float* weights, int64_t count, int64_t width, int64_t padded) {
    float* const out = Take(width * padded);
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t tap = 0; tap < width; ++tap) out[tap * padded + c] = weights[c * width + tap];
    }
    return out;
  }

 private:
  float* next_;
};

/// A causal convolution of some channels, and its SiLU.
class Convolution {
 public:
  Convolution(const ConvRows& conv, const ConvChannels& channels, ScratchVectors* scratch)
      : conv_(conv), channels_(channels), padded_(Padded(channels.count)) {
    weights_ = scratch->Transpose(channels.weights, channels.count, conv.width, padded_);
    if (channels.bias != nullptr) bias_ = scratch->Copy(channels.bias, channels.count, padded_);
  }

  /// At the row `t` of those that take part. `out` is padded.
  void Mix(int64_t t, float* out) const {
    for (int64_t c = 0; c < padded_; c += kLanes) {
      Store(out + c, bias_ == nullptr ? Zero() : Load(bias_ + c));
    }
    for (int64_t tap = 0; tap < conv_.width; ++tap) {
      const int64_t row = t - (conv_.width - 1) + tap;
      const float* x = channels_.before;
      if (row >= 0) {
        x = channels_.rows + conv_.rows[row] * channels_.stride;
      } else if (x != nullptr) {
        x += (row + conv_.width - 1) * conv_.channels;
      } else {
        continue;
      }
      const float* const w = weights_ + tap * padded_;
      for (int64_t c = 0; c < channels_.count; c += kLanes) {
        Store(out + c, Fma(LoadFirst(x + c, channels_.count - c), Load(w + c), Load(out + c)));
      }
    }
    Activate(Activation::kSilu, out, channels_.count);
  }

 private:
  const ConvRows& conv_;
  const ConvChannels& channels_;
  int64_t padded_;
  const float* weights_;
  const float* bias_ = nullptr;
};

/// The logarithm of 1 + e^x, which above 20 is x in fp32.
static float SoftPlus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

/// x = RmsNorm(x) * norm, and then * gate unless that is null; all padded.
static void GatedNorm(const float* norm, const float* gate, float epsilon, int64_t count,
                      float* x) {
  const int64_t padded = Padded(count);
  const float mean = Dot(x, x, padded) / static_cast<float>(count);
  const F factor = Set(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int64_t i = 0; i < padded; i += kLanes) {
    const F normed = Mul(Mul(Load(x + i), factor), Load(norm + i));
    Store(x + i, gate == nullptr ? normed : Mul(normed, Load(gate + i)));
  }
}

/// SiLU of the gates of a row.
static void LoadGates(const float* gates, int64_t count, float* out) {
  Widen(gates, DType::kF32, count, out);
  Activate(Activation::kSilu, out, count);
}

/// The state before the rows: zeros in state_after if there is none.
static const float* FirstState(const float* before, float* after, int64_t count) {
  if (before != nullptr) return before;
  for (int64_t i = 0; i < count; ++i) after[i] = 0.0f;
  return after;
}
