// The kernels of Mamba2Head and Mamba2Norm. Included inside the namespace of a simd_*.h.
#pragma once
#include "backends/cpu/recurrent/recurrent.inl.h"

class Mamba2Runner {
 public:
  explicit Mamba2Runner(const Mamba2Head& head)
      : head_(head),
        states_(Padded(head.keys.count)),
        values_(Padded(head.values.count)),
        scratch_(head.scratch),
        rate_(__builtin_expf(head.log_decay)),
        value_conv_(head.conv, head.values, &scratch_),
        key_conv_(head.conv, head.keys, &scratch_),
        query_conv_(head.conv, head.queries, &scratch_),
        value_(scratch_.Take(values_)),
        key_(scratch_.Take(states_)),
        query_(scratch_.Take(states_)),
        delta_(scratch_.Take(values_)),
        mixed_(scratch_.Take(values_)),
        gate_(scratch_.Take(values_)) {}

  void Run() {
    StatePass pass{};
    pass.key_dim = head_.keys.count;
    pass.value_dim = head_.values.count;
    pass.key = key_;
    pass.delta = delta_;
    pass.next_query = query_;
    pass.by_query = mixed_;
    pass.from = FirstState(head_.state_before, head_.state_after, pass.key_dim * pass.value_dim);
    pass.to = head_.state_after;
    for (int64_t t = 0; t < head_.conv.count; ++t) {
      value_conv_.Mix(t, value_);
      key_conv_.Mix(t, key_);
      query_conv_.Mix(t, query_);
      const int64_t row = head_.conv.rows[t];
      const float step = StepOf(*head_.steps.At(row));
      pass.decay = __builtin_expf(-rate_ * step);
      for (int64_t i = 0; i < values_; i += kLanes) {
        Store(delta_ + i, Mul(Set(step), Load(value_ + i)));
      }
      PassState<PassKind::kUpdateAndQuery>(pass);
      pass.from = head_.state_after;
      Write(row);
    }
  }

 private:
  float StepOf(float x) const {
    const float step = SoftPlus(x + head_.step_bias);
    const float least = step < head_.min_step ? head_.min_step : step;
    return least > head_.max_step ? head_.max_step : least;
  }

  void Write(int64_t row) {
    const int64_t count = head_.values.count;
    const bool gated = head_.gates.rows != nullptr;
    if (gated) LoadGates(head_.gates.At(row), count, gate_);
    for (int64_t i = 0; i < values_; i += kLanes) {
      const F y = Fma(Set(head_.skip), Load(value_ + i), Load(mixed_ + i));
      Store(mixed_ + i, gated ? Mul(y, Load(gate_ + i)) : y);
    }
    Narrow(mixed_, count, head_.out.type, head_.out.At(row));
  }

  const Mamba2Head& head_;
  int64_t states_;
  int64_t values_;
  ScratchVectors scratch_;
  float rate_;
  Convolution value_conv_;
  Convolution key_conv_;
  Convolution query_conv_;
  float* value_;
  float* key_;
  float* query_;
  float* delta_;
  float* mixed_;
  float* gate_;
};

void RunMamba2Head(const Mamba2Head& head) { Mamba2Runner(head).Run(); }

void RunMamba2Norm(const Mamba2Norm& norm) {
  const int64_t features = norm.heads * norm.head_dim;
  const int64_t padded = Padded(features);
  ScratchVectors scratch(norm.scratch);
  const float* const weights = scratch.Copy(norm.norm, features, padded);
  float* const x = scratch.Take(padded);
  float* const gate = norm.gates.rows == nullptr ? nullptr : scratch.Take(padded);
  const auto load = [&](const float* from, int64_t head_stride, float* to) {
    for (int64_t head = 0; head < norm.heads; ++head) {
      Widen(from + head * head_stride, DType::kF32, norm.head_dim, to + head * norm.head_dim);
    }
  };
  for (int64_t t = 0; t < norm.count; ++t) {
    const int64_t row = norm.rows[t];
    load(norm.mixed.At(row), norm.mixed_head, x);
    if (gate != nullptr) {
      load(norm.gates.At(row), norm.gate_head, gate);
      Activate(Activation::kSilu, gate, features);
    }
    GatedNorm(weights, gate, norm.epsilon, features, x);
    for (int64_t head = 0; head < norm.heads; ++head) {
      auto* const out = static_cast<uint8_t*>(norm.out.At(row)) + head * norm.out_head;
      Narrow(x + head * norm.head_dim, norm.head_dim, norm.out.type, out);
    }
  }
}
