// The kernel of DeltaHead. Included inside the namespace of a simd_*.h.
//
// A row reads the state as the row before it leaves it, and both products with the state are taken
// before the row's own update: S'^T q = decay S^T q + (k . q) delta. So the update by a row and the
// products for the next one are one pass over the state, which stays in L2.
#pragma once
#include "backends/cpu/recurrent/recurrent.inl.h"

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
        scratch_(head.scratch),
        rate_(__builtin_expf(head.log_decay)),
        query_conv_(head.conv, head.queries, &scratch_),
        key_conv_(head.conv, head.keys, &scratch_),
        value_conv_(head.conv, head.values, &scratch_) {
    for (DeltaRow& row : row_) {
      row = {scratch_.Take(keys_), scratch_.Take(keys_), scratch_.Take(values_), 0, 0, 0};
    }
    by_key_ = scratch_.Take(values_);
    by_query_ = scratch_.Take(values_);
    delta_ = scratch_.Take(values_);
    mixed_ = scratch_.Take(values_);
    gate_ = scratch_.Take(values_);
    norm_ = scratch_.Copy(head.norm, head.values.count, values_);
  }

  void Run() {
    StatePass pass{};
    pass.key_dim = head_.keys.count;
    pass.value_dim = head_.values.count;
    pass.by_key = by_key_;
    pass.by_query = by_query_;
    pass.delta = delta_;
    pass.from = FirstState(head_.state_before, head_.state_after, pass.key_dim * pass.value_dim);
    pass.to = head_.state_after;
    Prepare(0, &row_[0]);
    pass.next_key = row_[0].key;
    pass.next_query = row_[0].query;
    PassState<PassKind::kProducts>(pass);
    for (int64_t t = 0; t < head_.conv.count; ++t) {
      const DeltaRow& row = row_[t % 2];
      Mix(row);
      Write(head_.conv.rows[t]);
      pass.key = row.key;
      pass.decay = row.decay;
      if (t + 1 == head_.conv.count) {
        PassState<PassKind::kUpdate>(pass);
        break;
      }
      DeltaRow& next = row_[(t + 1) % 2];
      Prepare(t + 1, &next);
      pass.next_key = next.key;
      pass.next_query = next.query;
      PassState<PassKind::kUpdateAndProducts>(pass);
      pass.from = head_.state_after;
    }
  }

 private:
  static void ScaleBy(float factor, int64_t padded, float* x) {
    for (int64_t i = 0; i < padded; i += kLanes) Store(x + i, Mul(Set(factor), Load(x + i)));
  }

  void Prepare(int64_t t, DeltaRow* row) const {
    query_conv_.Mix(t, row->query);
    key_conv_.Mix(t, row->key);
    value_conv_.Mix(t, row->value);
    const auto norm = [&](const float* x) {
      return 1.0f / __builtin_sqrtf(Dot(x, x, keys_) + 1e-6f);
    };
    const auto depth = static_cast<float>(head_.keys.count);
    ScaleBy(norm(row->query) / __builtin_sqrtf(depth), keys_, row->query);
    ScaleBy(norm(row->key), keys_, row->key);
    row->query_key = Dot(row->query, row->key, keys_);
    const int64_t at = head_.conv.rows[t];
    row->decay = __builtin_expf(-rate_ * SoftPlus(*head_.decays.At(at) + head_.decay_bias));
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

  void Write(int64_t row) {
    const int64_t count = head_.values.count;
    LoadGates(head_.gates.At(row), count, gate_);
    GatedNorm(norm_, gate_, head_.epsilon, count, mixed_);
    Narrow(mixed_, count, head_.out.type, head_.out.At(row));
  }

  const DeltaHead& head_;
  int64_t keys_;
  int64_t values_;
  ScratchVectors scratch_;
  float rate_;
  Convolution query_conv_;
  Convolution key_conv_;
  Convolution value_conv_;
  DeltaRow row_[2];
  float* by_key_;
  float* by_query_;
  float* delta_;
  float* mixed_;
  float* gate_;
  float* norm_;
};

void RunDeltaHead(const DeltaHead& head) { DeltaRunner(head).Run(); }
