#include "backends/cuda/moe/experts/cuda_experts.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "backends/cuda/common/launch.h"
#include "backends/cuda/gemm/exact/exact_layout.h"
#include "backends/cuda/layout/sparse_layout.h"
#include "backends/cuda/moe/experts/experts_kernels.h"
#include "backends/cuda/moe/experts/experts_launch.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {

namespace {

/// Offsets into a workspace.
struct Layout {
  int64_t bytes = 0;

  int64_t Add(int64_t size) {
    const int64_t offset = bytes;
    bytes += RoundUp(size, kWorkspaceAlignment);
    return offset;
  }
};

/// Bytes of a row that a launch reads from the staged rows.
int64_t StagedBytes(const ExpertLaunch& launch) {
  if (launch.kernel == ExpertKernel::kGemv) return 0;
  return StagedStride(launch.k) * (launch.kernel == ExpertKernel::kExact ? 4 : 2);
}

/// A run: the call, and its parts of the workspace.
struct Pass {
  const ExpertsCall& call;
  SlotsView slots;
  int32_t* part_counts;
  float* inner;
  void* products;
  int64_t products_stride;
  float* results;
  void* staged;
  cudaStream_t stream;
  GateView gate;
};
/// The operands of a phase.
struct Operands {
  ExpertRows rows;
  bool staged = false;  ///< The rows are bf16 in the order of the slots.
  float* out = nullptr;
  int64_t out_stride = 0;
};

/// The parameters of a large-M kernel that depend on the call; gated results go to `products`.
template <typename Arguments>
void FillResults(const Pass& pass, const ExpertLaunch& launch, const Operands& operands,
                 Arguments* args) {
  args->table = reinterpret_cast<const TileExpert*>(launch.table.data());
  args->slots = pass.slots;
  args->gate = pass.gate;
  args->out = args->gated ? pass.products : operands.out;
  args->out_stride = args->gated ? pass.products_stride : operands.out_stride;
}

/// The 16-bit rows of a large-M kernel, in the order of the slots.
ActivationView RowsOfSlots(const Pass& pass, const ExpertLaunch& launch, const Operands& operands,
                           int64_t slots) {
  return {operands.staged ? pass.products : pass.staged,
          operands.staged ? pass.products_stride : StagedStride(launch.k),
          launch.bf16 ? Element::kBf16 : Element::kF16, static_cast<int>(slots),
          static_cast<int>(launch.k)};
}

cudaError_t EncodeMaps(const ActivationView& a, CUtensorMap (&maps)[kExpertWidths]) {
  const CUtensorMapDataType numbers =
      a.type == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  for (int width = 0; width < kExpertWidths; ++width) {
    const cudaError_t error = EncodeMap(a, numbers, 2, RowsOfWidth(width), &maps[width]);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

/// Whether the MMA kernel reads rows of tokens where they lie.
bool CanGather(const ExpertRows& rows, Element type) {
  constexpr int kRowAlignment = 16;
  return !rows.gated && rows.type == type && rows.stride * 2 % kRowAlignment == 0 &&
         reinterpret_cast<uintptr_t>(rows.data) % kRowAlignment == 0;
}

class CudaExperts final : public PlannedExperts {
 public:
  CudaExperts(const LaunchContext& context, std::shared_ptr<DeviceHandle> device,
              const ValueErrors& errors, const ExpertsProblem& problem, const LayerExperts& layer)
      : context_(context),
        device_(std::move(device)),
        errors_(errors),
        problem_(problem),
        layer_(layer) {}

  Status Plan();
  int64_t workspace_bytes() const override { return bytes_; }
  Status Run(const ExpertsCall& call) const override;

 private:
  int64_t experts() const { return static_cast<int64_t>(layer_.experts.size()); }
  Status Check(cudaError_t error, const char* what) const {
    return device_->errors.Check(error, what);
  }

  void Measure();
  Status DescribePresent();

  Status Sort(const Pass& pass) const;
  /// `launched`: GEMMs that the call has launched so far.
  Status RunPhase(const Pass& pass, const ExpertPhase& phase, const Operands& operands,
                  int* launched) const;
  Status RunGemv(const Pass& pass, const ExpertLaunch& launch, const Operands& operands,
                 int launched) const;
  Status Stage(const Pass& pass, const ExpertLaunch& launch, const ExpertRows& rows,
               Element type) const;
  Status RunWgmma(const Pass& pass, const ExpertLaunch& launch, const Operands& operands) const;
  Status RunMma(const Pass& pass, const ExpertLaunch& launch, const Operands& operands) const;
  Status RunExact(const Pass& pass, const ExpertLaunch& launch, int sides,
                  const Operands& operands) const;
  template <typename View>
  Status RunExactOf(const Pass& pass, const ExpertLaunch& launch, int sides,
                    const Operands& operands) const;
  Status Sum(const Pass& pass, int launched) const;

  const LaunchContext& context_;
  const std::shared_ptr<DeviceHandle> device_;
  const ValueErrors& errors_;
  const ExpertsProblem problem_;
  const LayerExperts& layer_;
  DeviceMemory present_;
  OwnSortArguments own_sort_;  ///< Without the ids.
  ExpertPhases phases_;
  int sort_parts_ = 1;
  int sort_warps_ = 1;
  int64_t slots_ = 0;
  int64_t inner_stride_ = 0;  ///< gate | up unless fused, and the shared expert's score.
  int64_t begin_at_ = 0;
  int64_t token_at_ = 0;
  int64_t slot_of_at_ = 0;
  int64_t part_counts_at_ = 0;
  int64_t inner_at_ = 0;
  int64_t products_at_ = 0;  ///< Fused: the gated activations, bf16 [slots, StagedStride(inner)].
  int64_t results_at_ = 0;
  int64_t staged_at_ = 0;
  int64_t bytes_ = 0;
};

Status CudaExperts::Plan() {
  sort_parts_ = SortPartsFor(problem_.tokens * problem_.top_k);
  sort_warps_ = SortWarpsFor(problem_.tokens * problem_.top_k, experts(), context_.shape);
  constexpr int64_t kMostGridRows = 65535;
  if (sort_warps_ == 0 || (experts() + 1) * kMaxSides > kMostGridRows) {
    return Status(Code::kUnsupported,
                  fmt::format("experts: {} are more than a GPU sorts by", experts()));
  }
  MARLIN_RETURN_IF_ERROR(Check(LoadExpertKernels(), "moe_sort"));
  MARLIN_RETURN_IF_ERROR(DescribePresent());
  MARLIN_ASSIGN_OR_RETURN(phases_, PlanExpertPhases(context_, device_, problem_, layer_));
  Measure();
  return {};
}

/// Lays out the workspace.
void CudaExperts::Measure() {
  const int64_t selections = problem_.tokens * problem_.top_k;
  slots_ = selections + (layer_.shared.present() ? problem_.tokens : 0);
  inner_stride_ =
      RoundUp(phases_.score_column + (layer_.shared_gate != nullptr ? 1 : 0), int64_t{4});
  int64_t staged = 0;
  for (const ExpertPhase* phase : {&phases_.up, &phases_.down}) {
    for (const ExpertLaunch& launch : phase->launches) {
      staged = std::max(staged, slots_ * StagedBytes(launch));
    }
  }
  const int64_t results = slots_ * layer_.hidden * 4;
  Layout layout;
  begin_at_ = layout.Add((experts() + 2) * 4);
  token_at_ = layout.Add(slots_ * 4);
  slot_of_at_ = layout.Add(selections * 4);
  part_counts_at_ = layout.Add(sort_parts_ > 1 ? sort_parts_ * (experts() + 1) * 4 : 0);
  inner_at_ = layout.Add(slots_ * inner_stride_ * 4);
  products_at_ = layout.Add(phases_.fused ? slots_ * StagedStride(phases_.inner) * 2 : 0);
  // Fused, the rows that were staged before the activation are not read after it.
  staged_at_ = layout.Add(phases_.fused ? std::max(staged, results) : staged);
  results_at_ = phases_.fused ? staged_at_ : layout.Add(results);
  bytes_ = layout.bytes;
}

Status CudaExperts::DescribePresent() {
  std::vector<uint8_t> present;
  for (const ExpertOperands& expert : layer_.experts) present.push_back(expert.present() ? 1 : 0);
  own_sort_.tokens = static_cast<int>(problem_.tokens);
  own_sort_.top_k = static_cast<int>(problem_.top_k);
  own_sort_.shared = layer_.shared.present();
  own_sort_.errors = errors_.view();
  for (size_t e = 0; e < present.size() && e < kMostOwnExperts; ++e) {
    own_sort_.present[e / 32] |= static_cast<uint32_t>(present[e]) << (e % 32);
  }
  MARLIN_ASSIGN_OR_RETURN(present_, UploadTable(device_, present));
  return {};
}

Status CudaExperts::Run(const ExpertsCall& call) const {
  MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
  const DeviceScope scope(device_->index);
  std::byte* const workspace = call.workspace;
  const auto words = [&](int64_t at) { return reinterpret_cast<int32_t*>(workspace + at); };
  const Pass pass = {
      call,
      {static_cast<int>(experts()), words(begin_at_), words(token_at_), words(slot_of_at_)},
      words(part_counts_at_),
      reinterpret_cast<float*>(workspace + inner_at_),
      workspace + products_at_,
      StagedStride(phases_.inner),
      reinterpret_cast<float*>(workspace + results_at_),
      workspace + staged_at_,
      static_cast<cudaStream_t>(call.stream),
      {static_cast<int>(problem_.gate.activation), problem_.gate.limit, problem_.gate.alpha}};
  if (!phases_.sorts_itself) MARLIN_RETURN_IF_ERROR(Sort(pass));
  int launched = 0;
  Operands up;
  up.rows.data = call.x;
  up.rows.stride = call.x_stride;
  up.rows.type = ElementOf(problem_.x_type);
  up.out = pass.inner;
  up.out_stride = inner_stride_;
  MARLIN_RETURN_IF_ERROR(RunPhase(pass, phases_.up, up, &launched));
  Operands down;
  down.staged = phases_.fused;
  down.rows.data = pass.inner;
  down.rows.stride = inner_stride_;
  down.rows.type = Element::kF32;
  down.rows.gated = true;
  down.rows.gate = pass.gate;
  down.out = pass.results;
  down.out_stride = layer_.hidden;
  MARLIN_RETURN_IF_ERROR(RunPhase(pass, phases_.down, down, &launched));
  return Sum(pass, launched);
}

Status CudaExperts::Sort(const Pass& pass) const {
  SortArguments args;
  args.ids = pass.call.ids;
  args.tokens = static_cast<int>(problem_.tokens);
  args.top_k = static_cast<int>(problem_.top_k);
  args.present = present_.data();
  args.shared = layer_.shared.present();
  args.parts = sort_parts_;
  args.warps = sort_warps_;
  args.part_counts = pass.part_counts;
  args.slots = pass.slots;
  args.errors = errors_.view();
  return Check(LaunchSort(args, pass.stream), "moe_sort");
}

Status CudaExperts::RunPhase(const Pass& pass, const ExpertPhase& phase, const Operands& operands,
                             int* launched) const {
  for (const ExpertLaunch& launch : phase.launches) {
    switch (launch.kernel) {
      case ExpertKernel::kGemv:
        MARLIN_RETURN_IF_ERROR(RunGemv(pass, launch, operands, *launched));
        break;
      case ExpertKernel::kWgmma:
        MARLIN_RETURN_IF_ERROR(RunWgmma(pass, launch, operands));
        break;
      case ExpertKernel::kMma:
        MARLIN_RETURN_IF_ERROR(RunMma(pass, launch, operands));
        break;
      case ExpertKernel::kExact:
        MARLIN_RETURN_IF_ERROR(RunExact(pass, launch, phase.sides, operands));
    }
    ++*launched;
  }
  return {};
}

Status CudaExperts::RunGemv(const Pass& pass, const ExpertLaunch& launch, const Operands& operands,
                            int launched) const {
  ExpertGemvArguments args = launch.gemv.arguments;
  args.table = reinterpret_cast<const TileExpert*>(launch.table.data());
  args.sorted_early = launched > 0;
  if (phases_.sorts_itself) {
    args.own_sort = own_sort_;
    args.own_sort.ids = pass.call.ids;
    args.own_sort.publishes = launched == 0;
  }
  args.slots = pass.slots;
  args.rows = operands.rows;
  args.out = operands.out;
  args.out_stride = operands.out_stride;
  void* parameters[] = {&args};
  const LaunchSize size = {dim3(static_cast<unsigned>(context_.shape.multiprocessors)),
                           32 * args.warps, launch.gemv.shared_bytes, true};
  return Check(Launch(launch.function, size, parameters, pass.stream), "moe_expert_gemm");
}

Status CudaExperts::Stage(const Pass& pass, const ExpertLaunch& launch, const ExpertRows& rows,
                          Element type) const {
  const OwnSortArguments& sort = own_sort_;
  const StageRowsArguments stage = {
      rows,        pass.slots,  pass.call.ids,         sort.tokens,
      sort.top_k,  sort.shared, launch.members.data(), static_cast<int>(launch.k),
      pass.staged, type};
  const int64_t rows_per_expert = CeilDivide(slots_, experts());
  return Check(LaunchStageRows(stage, static_cast<int>(rows_per_expert), pass.stream), "moe_stage");
}

Status CudaExperts::RunWgmma(const Pass& pass, const ExpertLaunch& launch,
                             const Operands& operands) const {
  const ActivationView a = RowsOfSlots(pass, launch, operands, slots_);
  if (!operands.staged) MARLIN_RETURN_IF_ERROR(Stage(pass, launch, operands.rows, a.type));
  CUtensorMap maps[kExpertWidths];
  MARLIN_RETURN_IF_ERROR(Check(EncodeMaps(a, maps), "moe_expert_gemm"));
  ExpertWgmmaArguments args = launch.wgmma.arguments;
  FillResults(pass, launch, operands, &args);
  void* parameters[] = {maps, &args};
  const LaunchSize size = {dim3(static_cast<unsigned>(context_.shape.multiprocessors)),
                           kWgmmaThreads, launch.wgmma.shared_bytes, true};
  return Check(Launch(launch.function, size, parameters, pass.stream), "moe_expert_gemm");
}

Status CudaExperts::RunMma(const Pass& pass, const ExpertLaunch& launch,
                           const Operands& operands) const {
  ActivationView a = RowsOfSlots(pass, launch, operands, slots_);
  ExpertMmaArguments args = launch.mma.arguments;
  args.gathered = !operands.staged && CanGather(operands.rows, a.type);
  if (args.gathered) {
    a.data = operands.rows.data;
    a.stride = operands.rows.stride;
  } else if (!operands.staged) {
    MARLIN_RETURN_IF_ERROR(Stage(pass, launch, operands.rows, a.type));
  }
  args.rows = a.data;
  args.row_stride = a.stride;
  FillResults(pass, launch, operands, &args);
  void* parameters[] = {&args};
  const LaunchSize size = {
      dim3(static_cast<unsigned>(context_.shape.multiprocessors * launch.mma.resident)),
      args.Threads(), launch.mma.shared_bytes, true};
  return Check(Launch(launch.function, size, parameters, pass.stream), "moe_expert_gemm");
}

Status CudaExperts::RunExact(const Pass& pass, const ExpertLaunch& launch, int sides,
                             const Operands& operands) const {
  switch (launch.exact) {
    case ExactWeights::kCanonical:
      return RunExactOf<CanonicalView>(pass, launch, sides, operands);
    case ExactWeights::kSparseTiles:
      return RunExactOf<SparseTileView>(pass, launch, sides, operands);
    default:
      return RunExactOf<TileView>(pass, launch, sides, operands);
  }
}

template <typename View>
Status CudaExperts::RunExactOf(const Pass& pass, const ExpertLaunch& launch, int sides,
                               const Operands& operands) const {
  const Element type = operands.rows.gated ? Element::kF32 : operands.rows.type;
  if (launch.k > 0) MARLIN_RETURN_IF_ERROR(Stage(pass, launch, operands.rows, type));
  ExpertExactArguments<View> args;
  args.table = reinterpret_cast<const ExactExpert<View>*>(launch.table.data());
  args.sides = sides;
  args.slots = pass.slots;
  args.a.data = pass.staged;
  args.a.stride = StagedStride(launch.k);
  args.a.type = type;
  args.out = operands.out;
  args.out_stride = operands.out_stride;
  if (launch.strips == 0) return {};
  void* parameters[] = {&args};
  const LaunchSize size = {
      dim3(static_cast<unsigned>(launch.strips), static_cast<unsigned>((experts() + 1) * sides)),
      32 * kMaxExactParts, ExactSharedBytes(kExpertExactRows, kMaxExactParts, kMaxExactParts),
      true};
  return Check(Launch(launch.function, size, parameters, pass.stream), "moe_expert_gemm_exact");
}

Status CudaExperts::Sum(const Pass& pass, int launched) const {
  SumArguments args;
  args.sorted_early = launched > (phases_.sorts_itself ? 1 : 0);
  args.slots = pass.slots;
  args.results = pass.results;
  args.weights = pass.call.weights;
  args.shared = layer_.shared.present();
  args.shared_scores = layer_.shared_gate != nullptr ? pass.inner + phases_.score_column : nullptr;
  args.score_stride = inner_stride_;
  args.tokens = static_cast<int>(problem_.tokens);
  args.top_k = static_cast<int>(problem_.top_k);
  args.hidden = static_cast<int>(layer_.hidden);
  args.out = pass.call.out;
  args.out_stride = pass.call.out_stride;
  args.out_type = ElementOf(problem_.out_type);
  return Check(LaunchSum(args, pass.stream), "moe_sum");
}

}  // namespace

Result<std::shared_ptr<const PlannedExperts>> PlanCudaExperts(
    const LaunchContext& context, const std::shared_ptr<DeviceHandle>& device,
    const ValueErrors& errors, const ExpertsProblem& problem, const LayerExperts& layer) {
  MARLIN_RETURN_IF_ERROR(device->errors.Lost());
  const DeviceScope scope(device->index);
  const AllowAllocation allow;
  auto planned = std::make_shared<CudaExperts>(context, device, errors, problem, layer);
  MARLIN_RETURN_IF_ERROR(planned->Plan());
  return std::shared_ptr<const PlannedExperts>(std::move(planned));
}

}  // namespace marlin::cuda
