#include "ops/host_experts.h"

#include <algorithm>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "marlin/decoder.h"
#include "ops/device.h"
#include "plan/expert_slots.h"

namespace marlin {
namespace {

/// Offsets into a workspace.
struct Layout {
  int64_t bytes = 0;

  int64_t Add(int64_t values) {
    const int64_t offset = bytes;
    bytes += RoundUp(values * 4, kBufferAlignment);
    return offset;
  }
};

class HostExperts final : public PlannedExperts {
 public:
  HostExperts(const Device& device, const ExpertsProblem& problem, const LayerExperts& experts)
      : device_(device), problem_(problem), layer_(experts) {
    inner_ = layer_.shared.inner();
    for (const ExpertOperands& expert : layer_.experts) inner_ = std::max(inner_, expert.inner());
    const int64_t selections = problem.tokens * problem.top_k;
    slots_ = selections + (layer_.shared.present() ? problem.tokens : 0);
    Layout layout;
    begin_at_ = layout.Add(static_cast<int64_t>(layer_.experts.size()) + 2);
    token_at_ = layout.Add(slots_);
    weight_at_ = layout.Add(slots_);
    slot_of_at_ = layout.Add(selections);
    gathered_at_ = layout.Add(slots_ * layer_.hidden);
    both_at_ = layout.Add(slots_ * 2 * inner_);
    results_at_ = layout.Add(slots_ * layer_.hidden);
    sum_at_ = layout.Add(problem.tokens * layer_.hidden);
    bytes_ = layout.bytes;
  }

  int64_t workspace_bytes() const override { return bytes_; }

  Status Run(const ExpertsCall& call) const override {
    // The host reads the ids and writes the sorted rows.
    MARLIN_RETURN_IF_ERROR(device_.Synchronize(call.stream));
    MARLIN_ASSIGN_OR_RETURN(const ExpertSlots slots, Sort(call));
    const int64_t hidden = layer_.hidden;
    const MutableTensorView gathered = Rows(call, gathered_at_, 0, slots.slots(), hidden);
    const TensorView x(call.x, problem_.x_type, {problem_.tokens, hidden}, {call.x_stride, 1});
    const TensorView tokens(slots.token, DType::kI32, {slots.slots()});
    MARLIN_RETURN_IF_ERROR(LookUpRows(device_, x, tokens, gathered, call.stream));
    for (int64_t e = 0; e <= slots.experts; ++e) {
      const ExpertOperands& expert =
          e == slots.experts ? layer_.shared : layer_.experts[static_cast<size_t>(e)];
      const int64_t count = slots.begin[e + 1] - slots.begin[e];
      if (count > 0) MARLIN_RETURN_IF_ERROR(RunExpert(call, expert, slots, slots.begin[e], count));
    }
    MARLIN_RETURN_IF_ERROR(device_.Synchronize(call.stream));
    return Sum(call, slots);
  }

 private:
  template <typename T>
  static T* At(const ExpertsCall& call, int64_t offset) {
    return reinterpret_cast<T*>(call.workspace + offset);
  }

  /// f32 rows of the workspace.
  static MutableTensorView Rows(const ExpertsCall& call, int64_t offset, int64_t first,
                                int64_t count, int64_t columns) {
    return {At<float>(call, offset) + first * columns, DType::kF32, {count, columns}};
  }

  Result<ExpertSlots> Sort(const ExpertsCall& call) const {
    const ExpertSlots slots{static_cast<int64_t>(layer_.experts.size()),
                            At<int32_t>(call, begin_at_), At<int32_t>(call, token_at_),
                            At<float>(call, weight_at_), At<int32_t>(call, slot_of_at_)};
    const Selections selections{call.ids, call.weights, problem_.tokens, problem_.top_k, 0};
    MARLIN_RETURN_IF_ERROR(SortByExpert(selections, layer_, slots));
    return slots;
  }

  /// out = x times a matrix.
  Status Multiply(const ExpertOperand& matrix, const TensorView& x, const MutableTensorView& out,
                  const TensorView& row_weight, void* stream) const {
    GemmOptions options;
    options.accuracy = problem_.accuracy;
    options.determinism = problem_.determinism;
    options.allow_bf16_activations = problem_.allow_bf16_activations;
    options.row_weight = row_weight;
    options.expert = matrix.index;
    options.stream = stream;
    if (matrix.bias != nullptr) {
      options.bias = TensorView(matrix.bias, DType::kF32, {out.dim(1)});
    }
    // The set of experts keeps the weights.
    const PreparedWeights weights(
        std::shared_ptr<const PreparedWeights::Storage>(std::shared_ptr<void>(), matrix.weights));
    return Gemm(device_, x, weights, out, options);
  }

  /// The results of `count` slots of an expert, from `first` on.
  Status RunExpert(const ExpertsCall& call, const ExpertOperands& expert, const ExpertSlots& slots,
                   int64_t first, int64_t count) const {
    const int64_t inner = expert.inner();
    const TensorView x = Rows(call, gathered_at_, first, count, layer_.hidden);
    const MutableTensorView both(At<float>(call, both_at_) + first * 2 * inner_, DType::kF32,
                                 {count, 2 * inner});
    const MutableTensorView gate(both.data(), DType::kF32, {count, inner}, {2 * inner, 1});
    const MutableTensorView up(both.As<float>() + inner, DType::kF32, {count, inner},
                               {2 * inner, 1});
    if (expert.up.weights == nullptr) {
      MARLIN_RETURN_IF_ERROR(Multiply(expert.gate, x, both, {}, call.stream));
    } else {
      MARLIN_RETURN_IF_ERROR(Multiply(expert.gate, x, gate, {}, call.stream));
      MARLIN_RETURN_IF_ERROR(Multiply(expert.up, x, up, {}, call.stream));
    }
    MARLIN_RETURN_IF_ERROR(ApplyGate(device_, gate, up, gate, problem_.gate, call.stream));
    float* const weight = slots.weight + first;
    if (&expert == &layer_.shared) MARLIN_RETURN_IF_ERROR(WeighShared(call, x, weight));
    return Multiply(expert.down, gate, Rows(call, results_at_, first, count, layer_.hidden),
                    TensorView(weight, DType::kF32, {count}), call.stream);
  }

  /// The factors of the shared expert's rows.
  Status WeighShared(const ExpertsCall& call, const TensorView& x, float* weight) const {
    if (layer_.shared_gate == nullptr) {
      std::fill(weight, weight + x.dim(0), 1.0F);
      return {};
    }
    const MutableTensorView scores(weight, DType::kF32, {x.dim(0), 1});
    MARLIN_RETURN_IF_ERROR(Multiply({layer_.shared_gate, 0, nullptr}, x, scores, {}, call.stream));
    return ApplySigmoid(device_, scores, call.stream);
  }

  /// out = the sums of the results, in the order of the selections.
  Status Sum(const ExpertsCall& call, const ExpertSlots& slots) const {
    const int64_t hidden = layer_.hidden;
    const MutableTensorView sums = Rows(call, sum_at_, 0, problem_.tokens, hidden);
    const auto* const results = At<float>(call, results_at_);
    for (int64_t t = 0; t < problem_.tokens; ++t) {
      float* const sum = sums.As<float>() + t * hidden;
      bool empty = true;
      const auto add = [&](int64_t slot) {
        const float* const row = results + slot * hidden;
        for (int64_t i = 0; i < hidden; ++i) sum[i] = empty ? row[i] : sum[i] + row[i];
        empty = false;
      };
      for (int64_t s = 0; s < problem_.top_k; ++s) {
        const int32_t slot = slots.slot_of[t * problem_.top_k + s];
        if (slot >= 0) add(slot);
      }
      if (layer_.shared.present()) add(slots.begin[slots.experts] + t);
      if (empty) std::fill(sum, sum + hidden, 0.0F);
    }
    const MutableTensorView out(call.out, problem_.out_type, {problem_.tokens, hidden},
                                {call.out_stride, 1});
    return Convert(device_, sums, out, call.stream);
  }

  const Device device_;
  const ExpertsProblem problem_;
  const LayerExperts& layer_;
  int64_t inner_ = 0;
  int64_t slots_ = 0;
  int64_t begin_at_ = 0;
  int64_t token_at_ = 0;
  int64_t weight_at_ = 0;
  int64_t slot_of_at_ = 0;
  int64_t gathered_at_ = 0;
  int64_t both_at_ = 0;
  int64_t results_at_ = 0;
  int64_t sum_at_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace

std::shared_ptr<const PlannedExperts> PlanHostExperts(const Device& device,
                                                      const ExpertsProblem& problem,
                                                      const LayerExperts& experts) {
  return std::make_shared<const HostExperts>(device, problem, experts);
}

}  // namespace marlin
