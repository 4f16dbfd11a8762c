#include "marlin/gemm.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "ops/gemm/candidates.h"
#include "ops/gemm/select_for.h"
#include "ops/gemm/transformed_gemm.h"
#include "plan/gemm/kernel_name.h"
#include "plan/gemm/select.h"

namespace marlin {

Result<KernelChoice> SelectFor(const Device::Impl& device, const GemmDesc& desc,
                               std::string_view forced, bool use_table) {
  const Backend& backend = device.backend();
  const auto cost = [&](const KernelDesc& kernel, const GemmDesc& problem) {
    return backend.Cost(kernel, problem);
  };
  const auto can_run_as = [&](const KernelDesc& kernel, const GemmDesc& problem,
                              const KernelVariant& variant) {
    return backend.CanRunAs(kernel, problem, variant);
  };
  const TuningTable* const table = use_table ? &device.tuning() : nullptr;
  return SelectKernel(desc, {backend.Properties(), backend.Kernels(), cost, can_run_as, table},
                      forced);
}

struct GemmPlan::State {
  PreparedWeights weights;
  Device device;
  GemmDesc desc;
  std::shared_ptr<const PlannedGemm> planned;
};

namespace {

/// Rejects values that are no enumerators, before anything depends on them.
Status CheckChoices(const GemmProblem& problem, const WeightsSpec& spec) {
  MARLIN_RETURN_IF_ERROR(CheckKnown(problem.activation));
  MARLIN_RETURN_IF_ERROR(CheckKnown(problem.accuracy));
  MARLIN_RETURN_IF_ERROR(CheckKnown(problem.determinism));
  if (problem.gated && spec.n % 2 != 0) {
    return Invalid(fmt::format("gated: n must be even, got {}", spec.n));
  }
  return {};
}

Status CheckProblem(const GemmProblem& problem, const WeightsSpec& spec) {
  if (problem.m < 0) return Invalid(fmt::format("m: expected 0 or more, got {}", problem.m));
  MARLIN_RETURN_IF_ERROR(CheckActivationType("a_type", problem.a_type));
  MARLIN_RETURN_IF_ERROR(CheckActivationType("out_type", problem.out_type));
  return CheckChoices(problem, spec);
}

GemmDesc Describe(const GemmProblem& problem, const PreparedWeights& weights) {
  GemmDesc desc = DescribeWeights(*Internals::Storage(weights));
  desc.m = problem.m;
  desc.a_type = problem.a_type;
  desc.c_type = problem.out_type;
  desc.gated = problem.gated;
  desc.activation = problem.activation;
  desc.allow_bf16_activations = problem.allow_bf16_activations;
  desc.accuracy = problem.accuracy;
  desc.determinism = problem.determinism;
  // Columns that are transformed first begin at aligned rows.
  desc.aligned = problem.aligned || TransformsInput(weights.spec());
  return desc;
}

/// Whether every row begins at a multiple of 16 bytes, as async copies require.
bool RowsAreAligned(const TensorView& a) {
  constexpr int64_t kAlignment = 16;
  const int64_t row = (a.dim(0) > 1 ? a.stride(0) : 0) * DTypeBytes(a.dtype());
  return reinterpret_cast<uintptr_t>(a.data()) % kAlignment == 0 && row % kAlignment == 0;
}

/// The problem of a call. Views of a rank other than 2 are rejected with the operands.
GemmProblem ProblemOf(const TensorView& a, const MutableTensorView& out,
                      const GemmOptions& options) {
  GemmProblem problem;
  problem.m = a.rank() > 0 ? a.dim(0) : 0;
  problem.a_type = a.dtype();
  problem.out_type = out.dtype();
  problem.activation = options.activation;
  problem.gated = options.gated;
  problem.accuracy = options.accuracy;
  problem.determinism = options.determinism;
  problem.allow_bf16_activations = options.allow_bf16_activations;
  problem.aligned = a.rank() == 2 && RowsAreAligned(a);
  return problem;
}

GemmArguments ArgumentsOf(const GemmOptions& options) {
  GemmArguments arguments;
  arguments.bias = options.bias;
  arguments.row_weight = options.row_weight;
  arguments.expert = options.expert;
  arguments.workspace = options.workspace;
  arguments.workspace_bytes = options.workspace_bytes;
  arguments.stream = options.stream;
  arguments.overlap_previous = options.overlap_previous;
  return arguments;
}

/// Checks the operands of one run against the problem.
Status CheckOperands(const GemmDesc& desc, const TensorView& a, const MutableTensorView& out,
                     const GemmArguments& arguments) {
  if (a.rank() != 2) return Invalid(fmt::format("a: expected rank 2, got {}", a.rank()));
  MARLIN_RETURN_IF_ERROR(CheckActivations("a", a, {desc.m, desc.k}));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, {desc.m, desc.gated ? desc.n / 2 : desc.n}));
  MARLIN_RETURN_IF_ERROR(CheckVector("bias", arguments.bias, desc.n, false));
  MARLIN_RETURN_IF_ERROR(CheckVector("row_weight", arguments.row_weight, desc.m, true));
  const ByteRange written(out);
  if (written.Overlaps(ByteRange(a)))
    MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "a", a, false));
  if (written.Overlaps(ByteRange(arguments.bias))) {
    MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "bias", arguments.bias, false));
  }
  if (!written.Overlaps(ByteRange(arguments.row_weight))) return {};
  return CheckNoOverlap("out", out, "row_weight", arguments.row_weight, false);
}

/// Describes a call and checks its operands. Errors: as for Gemm.
Result<GemmDesc> DescribeCall(const Device& device, const TensorView& a,
                              const PreparedWeights& weights, const MutableTensorView& out,
                              const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, weights));
  MARLIN_RETURN_IF_ERROR(CheckExpert(weights.spec(), options.expert));
  const GemmProblem problem = ProblemOf(a, out, options);
  MARLIN_RETURN_IF_ERROR(CheckChoices(problem, weights.spec()));
  const GemmDesc desc = Describe(problem, weights);
  MARLIN_RETURN_IF_ERROR(CheckOperands(desc, a, out, ArgumentsOf(options)));
  return desc;
}

/// Checks operands against a problem that was not derived from them.
Status CheckPlannedFor(const GemmDesc& desc, const WeightsSpec& spec, const TensorView& a,
                       const MutableTensorView& out, int64_t expert) {
  MARLIN_RETURN_IF_ERROR(CheckExpert(spec, expert));
  MARLIN_RETURN_IF_ERROR(CheckSameType("a", desc.a_type, a.dtype()));
  MARLIN_RETURN_IF_ERROR(CheckSameType("out", desc.c_type, out.dtype()));
  if (desc.aligned && !TransformsInput(spec) && a.rank() == 2 && !RowsAreAligned(a)) {
    return Invalid("a: rows must begin at multiples of 16 bytes, which the plan is for");
  }
  return {};
}

/// The plan of an empty problem: m or n is 0.
class EmptyGemm final : public PlannedGemm {
 public:
  explicit EmptyGemm(const KernelDesc& kernel) : PlannedGemm(kernel, {}, 0) {}
  Status Run(const GemmCall& /*call*/) const override { return {}; }
};

Result<std::shared_ptr<const PlannedGemm>> Plan(const Device& device, const GemmDesc& desc,
                                                const PreparedWeights& weights,
                                                const KernelDesc& kernel,
                                                const KernelVariant& variant) {
  if (desc.m == 0 || desc.n == 0) return {std::make_shared<const EmptyGemm>(kernel)};
  const Backend& backend = Internals::Impl(device).backend();
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const PlannedGemm> planned,
                          backend.Plan(kernel, desc, variant, *Internals::Storage(weights)));
  if (!TransformsInput(weights.spec())) return planned;
  return TransformFirst(backend, desc, std::move(planned));
}

/// The plan of a problem, from the weights' cache if it is there.
Result<std::shared_ptr<const PlannedGemm>> FindPlan(const Device& device, const GemmDesc& desc,
                                                    const PreparedWeights& weights,
                                                    std::string_view forced) {
  PlanCache& plans = Internals::Storage(weights)->plans;
  if (std::shared_ptr<const PlannedGemm> known = plans.Find(desc, forced)) return known;
  try {
    MARLIN_ASSIGN_OR_RETURN(const KernelChoice choice,
                            SelectFor(Internals::Impl(device), desc, forced));
    MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const PlannedGemm> planned,
                            Plan(device, desc, weights, *choice.kernel, choice.variant));
    plans.Add(desc, forced, planned);
    return planned;
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "gemm: cannot allocate a plan");
  }
}

GemmCall MakeCall(const GemmDesc& desc, const PreparedWeights& weights, const TensorView& a,
                  const MutableTensorView& out, const GemmArguments& arguments) {
  GemmCall call;
  call.desc = desc;
  call.weights = Internals::Storage(weights);
  call.expert = arguments.expert;
  call.a = a.data();
  call.a_stride = a.stride(0);
  call.c = out.data();
  call.c_stride = out.stride(0);
  call.epilogue.bias = arguments.bias.data();
  call.epilogue.bias_type = arguments.bias.dtype();
  call.epilogue.row_weight = arguments.row_weight.As<float>();
  call.stream = arguments.stream;
  call.overlap_previous = arguments.overlap_previous;
  return call;
}

Status RunIn(const PlannedGemm& planned, std::span<GemmCall> calls, void* workspace,
             int64_t workspace_bytes) {
  for (GemmCall& call : calls) call.workspace = workspace;
  return calls.size() == 1 ? planned.Run(calls[0]) : planned.RunBatch(calls, workspace_bytes);
}

/// Runs a plan on checked operands: one call, or several of a batch, whose operands are parts of a
/// and out.
Status RunPlan(const Device& device, const PlannedGemm& planned, std::span<GemmCall> calls,
               const TensorView& a, const MutableTensorView& out, const GemmArguments& arguments) {
  if (calls[0].desc.m == 0 || calls[0].desc.n == 0) return {};
  if (arguments.workspace != nullptr) {
    const GivenWorkspace given = {arguments.workspace, arguments.workspace_bytes};
    MARLIN_RETURN_IF_ERROR(CheckWorkspace(given, planned.workspace_bytes(), "a", a, out));
    return RunIn(planned, calls, given.data, given.bytes);
  }
  const int64_t bytes = calls.size() == 1
                            ? planned.workspace_bytes()
                            : planned.batch_workspace_bytes(static_cast<int64_t>(calls.size()));
  if (bytes == 0) return RunIn(planned, calls, nullptr, 0);
  MARLIN_ASSIGN_OR_RETURN(const Workspace workspace,
                          Internals::Impl(device).TakeWorkspace(arguments.stream, bytes));
  Status status = RunIn(planned, calls, workspace.data, workspace.bytes);
  Internals::Impl(device).ReturnWorkspace(workspace);
  return status;
}

}  // namespace

std::string_view GemmPlan::kernel() const {
  return state_ == nullptr ? std::string_view() : state_->planned->kernel().name;
}
std::string GemmPlan::variant() const {
  return state_ == nullptr ? std::string() : state_->planned->variant().ToString();
}
std::string_view GemmPlan::accuracy() const {
  return state_ == nullptr ? std::string_view() : GradeName(state_->planned->kernel().grade);
}
int64_t GemmPlan::workspace_bytes() const {
  return state_ == nullptr ? 0 : state_->planned->workspace_bytes();
}
std::string GemmPlan::ToString() const {
  if (state_ == nullptr) return "an empty plan";
  return fmt::format("{} ({}), workspace {} bytes",
                     marlin::ToString(kernel(), state_->planned->variant()), accuracy(),
                     workspace_bytes());
}

Status GemmPlan::Run(const TensorView& a, const MutableTensorView& out,
                     const GemmArguments& arguments) const {
  if (state_ == nullptr) return Invalid("plan: an empty plan cannot run");
  const State& state = *state_;
  MARLIN_RETURN_IF_ERROR(
      CheckPlannedFor(state.desc, state.weights.spec(), a, out, arguments.expert));
  MARLIN_RETURN_IF_ERROR(CheckOperands(state.desc, a, out, arguments));
  GemmCall call = MakeCall(state.desc, state.weights, a, out, arguments);
  return RunPlan(state.device, *state.planned, {&call, 1}, a, out, arguments);
}

namespace {

Result<GemmPlan> MakePlan(const Device& device, const GemmDesc& desc,
                          const PreparedWeights& weights, std::string_view forced) {
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const PlannedGemm> planned,
                          FindPlan(device, desc, weights, forced));
  return GemmPlan(std::make_shared<const GemmPlan::State>(
      GemmPlan::State{weights, device, desc, std::move(planned)}));
}

}  // namespace

Result<GemmPlan> PlanGemm(const Device& device, const GemmProblem& problem,
                          const PreparedWeights& weights) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, weights));
  MARLIN_RETURN_IF_ERROR(CheckProblem(problem, weights.spec()));
  return MakePlan(device, Describe(problem, weights), weights, problem.kernel);
}

Result<GemmPlan> PlanGemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
                          const MutableTensorView& out, const GemmOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const GemmDesc desc, DescribeCall(device, a, weights, out, options));
  return MakePlan(device, desc, weights, options.kernel);
}

Result<std::vector<GemmCandidate>> ListCandidates(const Device& device, const TensorView& a,
                                                  const PreparedWeights& weights,
                                                  const MutableTensorView& out,
                                                  const GemmOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const GemmDesc desc, DescribeCall(device, a, weights, out, options));
  const Backend& backend = Internals::Impl(device).backend();
  MARLIN_ASSIGN_OR_RETURN(const auto planned, FindPlan(device, desc, weights, ""));
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice estimated,
                          SelectFor(Internals::Impl(device), desc, "", false));
  std::vector<GemmCandidate> candidates;
  for (const KernelDesc& kernel : backend.Kernels()) {
    if (!CheckSupport(kernel, desc, backend.Properties()).ok()) continue;
    std::vector<KernelVariant> variants = backend.Variants(kernel, desc);
    if (variants.empty()) variants.emplace_back();
    // A tuning table may name a tiling that Variants no longer lists.
    const bool is_planned = &planned->kernel() == &kernel;
    if (is_planned &&
        std::find(variants.begin(), variants.end(), planned->variant()) == variants.end()) {
      variants.push_back(planned->variant());
    }
    for (const KernelVariant& variant : variants) {
      MARLIN_ASSIGN_OR_RETURN(const auto plan, Plan(device, desc, weights, kernel, variant));
      GemmCandidate candidate;
      candidate.name = ToString(kernel.name, variant);
      candidate.accuracy = GradeName(kernel.grade);
      candidate.workspace_bytes = plan->workspace_bytes();
      candidate.planned = is_planned && planned->variant() == variant;
      candidate.selectable =
          estimated.kernel == &kernel || MayReplace(kernel, *estimated.kernel, desc);
      candidates.push_back(std::move(candidate));
    }
  }
  return candidates;
}

Status Gemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const GemmDesc desc, DescribeCall(device, a, weights, out, options));
  const GemmArguments arguments = ArgumentsOf(options);
  MARLIN_ASSIGN_OR_RETURN(const auto planned, FindPlan(device, desc, weights, options.kernel));
  GemmCall call = MakeCall(desc, weights, a, out, arguments);
  return RunPlan(device, *planned, {&call, 1}, a, out, arguments);
}

namespace {

/// Matrix `i` of a view of rank 3, or vector i of one of rank 2.
template <typename View>
View ItemOf(const View& view, int64_t i) {
  const int64_t first = i * view.stride(0) * DTypeBytes(view.dtype());
  auto* const data =
      static_cast<
          std::conditional_t<std::is_same_v<View, TensorView>, const std::byte, std::byte>*>(
          view.data()) +
      first;
  if (view.rank() == 2) return View(data, view.dtype(), {view.dim(1)}, {view.stride(1)});
  return View(data, view.dtype(), {view.dim(1), view.dim(2)}, {view.stride(1), view.stride(2)});
}

Status CheckBatch(const char* name, const TensorView& view, int rank, int64_t batch) {
  if (view.rank() != rank) {
    return Invalid(fmt::format("{}: expected rank {}, got {}", name, rank, view.rank()));
  }
  if (view.dim(0) == batch) return {};
  return Invalid(fmt::format("{}: expected {} matrices, got {}", name, batch, view.dim(0)));
}

/// The options of one matrix of a batch.
GemmOptions OptionsOf(const GemmOptions& options, int64_t i) {
  GemmOptions own = options;
  own.expert = i;
  if (options.bias.rank() == 2) own.bias = ItemOf(options.bias, i);
  if (!options.row_weight.empty()) own.row_weight = ItemOf(options.row_weight, i);
  return own;
}

Status CheckBatches(const Device& device, const TensorView& a, const PreparedWeights& weights,
                    const MutableTensorView& out, const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckWeights(device, weights));
  const int64_t batch = weights.spec().experts;
  MARLIN_RETURN_IF_ERROR(CheckBatch("a", a, 3, batch));
  MARLIN_RETURN_IF_ERROR(CheckBatch("out", out, 3, batch));
  if (options.bias.rank() > 1) MARLIN_RETURN_IF_ERROR(CheckBatch("bias", options.bias, 2, batch));
  if (!options.row_weight.empty()) {
    MARLIN_RETURN_IF_ERROR(CheckBatch("row_weight", options.row_weight, 2, batch));
  }
  if (options.expert != 0) {
    return Invalid(fmt::format("expert: expected 0 for a batch, got {}", options.expert));
  }
  // Shapes, types and strides are the first matrix's; memory is checked whole.
  MARLIN_RETURN_IF_ERROR(CheckMemory("a", a));
  MARLIN_RETURN_IF_ERROR(CheckMemory("out", out));
  for (const auto& [name, view] : {std::pair<const char*, TensorView>("a", a),
                                   {"bias", options.bias},
                                   {"row_weight", options.row_weight}}) {
    if (!view.empty()) MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, name, view, false));
  }
  if (batch == 0) return {};
  return DescribeCall(device, ItemOf(a, 0), weights, ItemOf(out, 0), OptionsOf(options, 0))
      .status();
}

}  // namespace

Status BatchedGemm(const Device& device, const TensorView& a, const PreparedWeights& weights,
                   const MutableTensorView& out, const GemmOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckBatches(device, a, weights, out, options));
  // Calls of one problem run together. The matrices may differ in their alignment.
  std::array<GemmCall, 16> calls;
  size_t count = 0;
  const auto run = [&]() -> Status {
    MARLIN_ASSIGN_OR_RETURN(const auto planned,
                            FindPlan(device, calls[0].desc, weights, options.kernel));
    const std::span<GemmCall> together(calls.data(), std::exchange(count, 0));
    return RunPlan(device, *planned, together, a, out, ArgumentsOf(options));
  };
  for (int64_t i = 0; i < weights.spec().experts; ++i) {
    const TensorView from = ItemOf(a, i);
    const MutableTensorView to = ItemOf(out, i);
    const GemmOptions own = OptionsOf(options, i);
    MARLIN_ASSIGN_OR_RETURN(const GemmDesc desc, DescribeCall(device, from, weights, to, own));
    if (count == calls.size() || (count > 0 && !(desc == calls[0].desc))) {
      MARLIN_RETURN_IF_ERROR(run());
    }
    calls[count++] = MakeCall(desc, weights, from, to, ArgumentsOf(own));
  }
  return count == 0 ? Status() : run();
}

Status Gemv(const Device& device, const TensorView& a, const PreparedWeights& weights,
            const MutableTensorView& out, const GemmOptions& options) {
  if (a.rank() != 1) return Invalid(fmt::format("a: expected rank 1, got {}", a.rank()));
  if (out.rank() != 1) return Invalid(fmt::format("out: expected rank 1, got {}", out.rank()));
  const TensorView row(a.data(), a.dtype(), {1, a.dim(0)}, {a.dim(0), a.stride(0)});
  const MutableTensorView out_row(out.data(), out.dtype(), {1, out.dim(0)},
                                  {out.dim(0), out.stride(0)});
  return Gemm(device, row, weights, out_row, options);
}

}  // namespace marlin
