// The experts of a layer: checks sets and runs; backends plan and run them.
#include "plan/moe/experts.h"

#include <fmt/core.h>

#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "base/macros.h"
#include "marlin/moe.h"
#include "ops/decoder/decoder_checks.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "ops/gemm/select_for.h"
#include "ops/moe/experts_state.h"

namespace marlin {
namespace {

Status CheckSizes(const std::string& name, const WeightsSpec& spec, int64_t k, int64_t n) {
  if (spec.k == k && spec.n == n) return {};
  return Invalid(fmt::format("{}: expected [{}, {}], got [{}, {}]", name, k, n, spec.k, spec.n));
}

/// The rows of a layer's experts are gathered once, for all of their matrices.
Status CheckTakesInput(const WeightsSpec& spec) {
  if (!TransformsInput(spec)) return {};
  const std::string_view what = spec.has_permutation   ? "a permutation along k"
                                : spec.has_input_scale ? "input scales"
                                                       : "Hadamard blocks";
  return Status(Code::kUnsupported,
                fmt::format("weights with {} cannot be experts; prepare FoldInput of them", what));
}

/// Checks sets of experts and turns them into operands.
class SetBuilder {
 public:
  SetBuilder(const Device& device, ExpertSet::Storage* storage)
      : device_(device), storage_(*storage) {}

  /// Appends an expert. `name` is its name in errors.
  Status Add(const std::string& name, const Expert& expert, ExpertOperands* operands) {
    const bool none =
        !expert.gate.weights.valid() && !expert.up.weights.valid() && !expert.down.weights.valid();
    if (none) return {};
    const WeightsSpec& down = expert.down.weights.spec();
    if (storage_.layer.hidden == 0) storage_.layer.hidden = expert.gate.weights.spec().k;
    const int64_t hidden = storage_.layer.hidden;
    const bool apart = expert.up.weights.valid();
    MARLIN_RETURN_IF_ERROR(
        AddMatrix(name + " gate", expert.gate, hidden, down.k * (apart ? 1 : 2), &operands->gate));
    if (apart) {
      MARLIN_RETURN_IF_ERROR(AddMatrix(name + " up", expert.up, hidden, down.k, &operands->up));
    }
    return AddMatrix(name + " down", expert.down, down.k, hidden, &operands->down);
  }

  Status AddGate(const PreparedWeights& gate) {
    if (!gate.valid()) return {};
    MARLIN_RETURN_IF_ERROR(CheckWeights(device_, gate).WithContext("shared gate"));
    MARLIN_RETURN_IF_ERROR(CheckSizes("shared gate", gate.spec(), storage_.layer.hidden, 1));
    MARLIN_RETURN_IF_ERROR(CheckTakesInput(gate.spec()).WithContext("shared gate"));
    storage_.kept.push_back(gate);
    storage_.layer.shared_gate = Internals::Storage(gate);
    return {};
  }

 private:
  Status AddMatrix(const std::string& name, const ExpertMatrix& matrix, int64_t k, int64_t n,
                   ExpertOperand* operand) {
    MARLIN_RETURN_IF_ERROR(CheckWeights(device_, matrix.weights).WithContext(name));
    MARLIN_RETURN_IF_ERROR(CheckExpert(matrix.weights.spec(), matrix.index).WithContext(name));
    MARLIN_RETURN_IF_ERROR(CheckSizes(name, matrix.weights.spec(), k, n));
    MARLIN_RETURN_IF_ERROR(CheckTakesInput(matrix.weights.spec()).WithContext(name));
    MARLIN_RETURN_IF_ERROR(CheckVector("bias", matrix.bias, n, true).WithContext(name));
    storage_.kept.push_back(matrix.weights);
    *operand = {Internals::Storage(matrix.weights), matrix.index, matrix.bias.As<float>()};
    return {};
  }

  const Device& device_;
  ExpertSet::Storage& storage_;
};

}  // namespace

Status CheckProblem(const ExpertsProblem& problem) {
  if (problem.tokens < 0) {
    return Invalid(fmt::format("tokens: expected 0 or more, got {}", problem.tokens));
  }
  if (problem.top_k < 1) {
    return Invalid(fmt::format("top_k: expected 1 or more, got {}", problem.top_k));
  }
  // Rows of experts have 32-bit numbers.
  constexpr int64_t kMostSelections = int64_t{1} << 30;
  if (SaturatingProduct(problem.tokens, problem.top_k) > kMostSelections) {
    return Invalid(fmt::format("tokens: {} with top_k {} select more than {} experts",
                               problem.tokens, problem.top_k, kMostSelections));
  }
  MARLIN_RETURN_IF_ERROR(CheckActivationType("x_type", problem.x_type));
  MARLIN_RETURN_IF_ERROR(CheckActivationType("out_type", problem.out_type));
  MARLIN_RETURN_IF_ERROR(CheckKnown(problem.gate.activation));
  MARLIN_RETURN_IF_ERROR(CheckKnown(problem.accuracy));
  return CheckKnown(problem.determinism);
}

namespace {

Result<std::shared_ptr<const PlannedExperts>> Plan(const Device& device,
                                                   const ExpertsProblem& problem,
                                                   const LayerExperts& layer) {
  const Device::Impl& impl = Internals::Impl(device);
  const SelectGemm select = [device](const GemmDesc& desc) {
    return SelectFor(Internals::Impl(device), desc);
  };
  MARLIN_ASSIGN_OR_RETURN(auto planned, impl.backend().PlanExperts(problem, layer, select));
  if (planned != nullptr) return planned;
  return Status(Code::kUnsupported, impl.backend().Info().name + ": cannot run experts");
}

/// The plan of a problem, from the set's memory if it is there.
Result<std::shared_ptr<const PlannedExperts>> FindPlan(const Device& device,
                                                       const ExpertsProblem& problem,
                                                       const ExpertSet::Storage& set) {
  {
    const std::lock_guard lock(set.mutex);
    for (const ExpertSet::Storage::Plan& plan : set.plans) {
      if (plan.problem == problem) return plan.planned;
    }
  }
  MARLIN_ASSIGN_OR_RETURN(auto planned, Plan(device, problem, set.layer));
  const std::lock_guard lock(set.mutex);
  if (set.plans.size() < ExpertSet::Storage::kPlans) {
    set.plans.push_back({problem, planned});
  } else {
    set.plans[set.next_plan++ % ExpertSet::Storage::kPlans] = {problem, planned};
  }
  return planned;
}

Status CheckOperands(const ExpertsProblem& problem, int64_t hidden, const TensorView& x,
                     const TensorView& ids, const TensorView& weights,
                     const MutableTensorView& out) {
  const Shape rows{problem.tokens, hidden};
  const Shape selections{problem.tokens, problem.top_k};
  MARLIN_RETURN_IF_ERROR(CheckSameType("x", problem.x_type, x.dtype()));
  MARLIN_RETURN_IF_ERROR(CheckSameType("out", problem.out_type, out.dtype()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("x", x, rows));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, rows));
  MARLIN_RETURN_IF_ERROR(CheckInt32("ids", ids, selections));
  if (weights.dtype() != DType::kF32 || !(weights.shape() == selections) ||
      !weights.IsContiguous()) {
    return Invalid(fmt::format("weights: expected contiguous f32 {}, got {} {}",
                               selections.ToString(), DTypeName(weights.dtype()),
                               weights.shape().ToString()));
  }
  MARLIN_RETURN_IF_ERROR(CheckMemory("weights", weights));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "x", x, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("out", out, "ids", ids));
  return CheckNoOverlapWithIndices("out", out, "weights", weights);
}

}  // namespace

Result<ExpertSet> ExpertSet::Make(const Device& device, std::span<const Expert> experts,
                                  const SharedExpert& shared) {
  if (experts.empty()) return Invalid("experts: expected one or more");
  try {
    auto storage = std::make_shared<Storage>();
    storage->device = Internals::Shared(device);
    storage->operands.resize(experts.size());
    SetBuilder builder(device, storage.get());
    for (size_t i = 0; i < experts.size(); ++i) {
      MARLIN_RETURN_IF_ERROR(
          builder.Add(fmt::format("expert {}", i), experts[i], &storage->operands[i]));
    }
    MARLIN_RETURN_IF_ERROR(builder.Add("shared expert", shared.expert, &storage->layer.shared));
    MARLIN_RETURN_IF_ERROR(builder.AddGate(shared.gate));
    storage->layer.experts = storage->operands;
    return Internals::Make<ExpertSet>(std::move(storage));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "experts: cannot allocate");
  }
}

int64_t ExpertSet::count() const {
  return storage_ == nullptr ? 0 : static_cast<int64_t>(storage_->operands.size());
}
int64_t ExpertSet::hidden() const { return storage_ == nullptr ? 0 : storage_->layer.hidden; }

Result<ExpertsPlan> PlanExperts(const Device& device, const ExpertsProblem& problem,
                                const ExpertSet& experts) {
  if (!experts.valid()) return Invalid("experts: an empty set");
  MARLIN_RETURN_IF_ERROR(CheckProblem(problem));
  const ExpertSet::Storage& set = *Internals::Storage(experts);
  if (set.device != Internals::Shared(device)) {
    return Invalid("experts: prepared for another device");
  }
  try {
    auto state = std::make_shared<ExpertsPlan::State>(
        ExpertsPlan::State{device, Internals::Shared(experts), set.layer.hidden, problem, nullptr});
    if (problem.tokens > 0 && set.layer.hidden > 0) {
      MARLIN_ASSIGN_OR_RETURN(state->planned, FindPlan(device, problem, set));
    }
    return ExpertsPlan(std::move(state));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "experts: cannot allocate a plan");
  }
}

int64_t ExpertsPlan::workspace_bytes() const {
  return state_ == nullptr || state_->planned == nullptr ? 0 : state_->planned->workspace_bytes();
}

Status ExpertsPlan::Run(const TensorView& x, const TensorView& ids, const TensorView& weights,
                        const MutableTensorView& out, const ExpertsArguments& arguments) const {
  if (state_ == nullptr) return Invalid("plan: an empty plan cannot run");
  const State& state = *state_;
  MARLIN_RETURN_IF_ERROR(CheckOperands(state.problem, state.hidden, x, ids, weights, out));
  if (state.planned == nullptr) return {};
  ExpertsCall call;
  call.x = x.data();
  call.x_stride = x.stride(0);
  call.ids = ids.As<int32_t>();
  call.weights = weights.As<float>();
  call.out = out.data();
  call.out_stride = out.stride(0);
  call.stream = arguments.stream;
  const int64_t bytes = state.planned->workspace_bytes();
  if (arguments.workspace != nullptr) {
    MARLIN_RETURN_IF_ERROR(
        CheckWorkspace({arguments.workspace, arguments.workspace_bytes}, bytes, "x", x, out));
    call.workspace = static_cast<std::byte*>(arguments.workspace);
    return state.planned->Run(call);
  }
  MARLIN_ASSIGN_OR_RETURN(const Workspace workspace,
                          Internals::Impl(state.device).TakeWorkspace(call.stream, bytes));
  call.workspace = static_cast<std::byte*>(workspace.data);
  Status status = state.planned->Run(call);
  Internals::Impl(state.device).ReturnWorkspace(workspace);
  return status;
}

}  // namespace marlin
