#include "backends/cuda/kernels/experts/cuda_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/kernels/common/launch.h"
#include "backends/cuda/kernels/exact/exact_layout.h"
#include "backends/cuda/kernels/experts/experts_functions.h"
#include "backends/cuda/kernels/experts/experts_kernels.h"
#include "backends/cuda/kernels/experts/experts_plan.h"
#include "backends/cuda/kernels/gemv/gemv_layout.h"
#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/plan/kernel_family.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {

namespace {

const void* GemvFunctionOf(CodeKind kind, bool bf16, ParameterUse use, int octets) {
  switch (kind) {
#define MARLIN_KIND(name)                                           \
  case CodeKind::name:                                              \
    if constexpr (IsBuilt(CodeKind::name))                          \
      return ExpertGemvFunction<CodeKind::name>(bf16, use, octets); \
    break;
#include "backends/cuda/layout/code_kinds.def"
#undef MARLIN_KIND
  }
  return nullptr;
}

const void* ExactFunctionOf(CodeKind kind, bool tiled) {
  switch (kind) {
#define MARLIN_KIND(name)                                                                     \
  case CodeKind::name:                                                                        \
    if constexpr (IsBuilt(CodeKind::name)) return ExpertExactFunction<CodeKind::name>(tiled); \
    break;
#include "backends/cuda/layout/code_kinds.def"
#undef MARLIN_KIND
  }
  return nullptr;
}

/// A matrix of the layer: where it stands in the launches' tables, and its GEMM.
struct Matrix {
  const ExpertOperand* operand = nullptr;
  int64_t row = 0;  ///< expert * sides + side.
  int column = 0;   ///< Column of its first output in a row of results.
  GemmDesc desc;
  bool exact = false;

  const PreparedTiles& weights() const {
    return static_cast<const PreparedTiles&>(*operand->weights);
  }
  bool tiled() const { return weights().traits.tiled; }
  CodeKind kind() const { return weights().kind(); }
  bool bf16() const { return desc.a_type != DType::kF16 || !desc.weights.fits_f16; }
};

/// Whether one launch of the GEMV kernel can run both.
bool SameTiles(const Matrix& a, const Matrix& b) {
  if (a.kind() != b.kind() || a.bf16() != b.bf16()) return false;
  if (a.desc.format != b.desc.format && a.kind() != CodeKind::kFp4) return false;
  const TileView x = a.weights().Tiles(0);
  const TileView y = b.weights().Tiles(0);
  const bool same_values = a.desc.format != Format::kCodebook4 || x.values == y.values;
  return same_values && x.k == y.k && x.tile_bytes == y.tile_bytes &&
         x.groups_per_tile == y.groups_per_tile && x.zero_kind == y.zero_kind &&
         x.integer_zeros == y.integer_zeros && x.bf16_parameters == y.bf16_parameters &&
         x.bf16_codes == y.bf16_codes && x.table_exponent == y.table_exponent &&
         x.offset == y.offset;
}

/// The exact kernel reads everything else from the table.
bool SameExact(const Matrix& a, const Matrix& b) {
  return a.kind() == b.kind() && a.tiled() == b.tiled() && a.desc.k == b.desc.k;
}

bool OneLaunch(const Matrix& a, const Matrix& b) {
  if (a.exact != b.exact) return false;
  return a.exact ? SameExact(a, b) : SameTiles(a, b);
}

/// One launch: its function, and its parameters but for pointers into the workspace.
struct ExpertLaunch {
  bool exact = false;
  bool tiled = true;
  const void* function = nullptr;
  ExpertGemvPlan gemv;
  DeviceMemory table;
  DeviceMemory members;  ///< Exact: StageRowsArguments::members.
  int64_t k = 0;
  int strips = 0;  ///< Exact: n-tiles of the widest matrix.
};

/// Lets this thread allocate while a stream is captured: planning belongs to no graph.
class AllowAllocation {
 public:
  AllowAllocation() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowAllocation() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowAllocation(const AllowAllocation&) = delete;
  AllowAllocation& operator=(const AllowAllocation&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Offsets into a workspace.
struct Layout {
  int64_t bytes = 0;

  int64_t Add(int64_t size) {
    const int64_t offset = bytes;
    bytes += RoundUp(size, kWorkspaceAlignment);
    return offset;
  }
};

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
  /// The GEMMs before the activation, or those after it.
  struct Phase {
    int sides = 1;
    std::vector<ExpertLaunch> launches;
  };
  /// A run: the call, and its parts of the workspace.
  struct Pass {
    const ExpertsCall& call;
    SlotsView slots;
    float* inner;
    float* results;
    void* staged;
    cudaStream_t stream;
  };

  const ExpertOperands& ExpertAt(int64_t e) const {
    return e < experts() ? layer_.experts[static_cast<size_t>(e)] : layer_.shared;
  }
  int64_t experts() const { return static_cast<int64_t>(layer_.experts.size()); }
  std::string NameOf(int64_t e) const {
    return e < experts() ? fmt::format("expert {}", e) : std::string("shared expert");
  }
  Status Check(cudaError_t error, const char* what) const {
    return device_->errors.Check(error, what);
  }

  void Measure();
  Status UploadPresent();
  Status AddMatrix(const std::string& name, const ExpertOperand& operand, int64_t row, int column,
                   DType a_type, std::vector<Matrix>* matrices) const;
  Status PlanPhase(const std::vector<Matrix>& matrices, Phase* phase) const;
  Status PlanLaunch(const std::vector<Matrix>& matrices, int sides, ExpertLaunch* launch) const;
  Status PlanGemv(const std::vector<Matrix>& matrices, int sides, ExpertLaunch* launch) const;
  template <typename View>
  Status PlanExact(const std::vector<Matrix>& matrices, int sides, ExpertLaunch* launch) const;
  template <typename T>
  Status Upload(const std::vector<T>& table, DeviceMemory* memory) const;
  std::optional<ExpertGemvPlan> GemvPlanOf(const Matrix& matrix, int sides) const;

  Status Sort(const Pass& pass) const;
  Status RunPhase(const Pass& pass, const Phase& phase, const ExpertRows& rows, float* out,
                  int64_t out_stride, bool* sorted_early) const;
  Status RunGemv(const Pass& pass, const ExpertLaunch& launch, const ExpertRows& rows, float* out,
                 int64_t out_stride, bool sorted_early) const;
  template <typename View>
  Status RunExact(const Pass& pass, const ExpertLaunch& launch, int sides, const ExpertRows& rows,
                  float* out, int64_t out_stride) const;
  Status Sum(const Pass& pass) const;

  const LaunchContext& context_;
  const std::shared_ptr<DeviceHandle> device_;
  const ValueErrors& errors_;
  const ExpertsProblem problem_;
  const LayerExperts& layer_;
  DeviceMemory present_;
  Phase up_;
  Phase down_;
  int sort_warps_ = 1;
  int64_t slots_ = 0;
  int64_t inner_ = 0;         ///< The widest expert's.
  int64_t inner_stride_ = 0;  ///< gate | up, and the shared expert's score.
  int64_t begin_at_ = 0;
  int64_t token_at_ = 0;
  int64_t slot_of_at_ = 0;
  int64_t inner_at_ = 0;
  int64_t results_at_ = 0;
  int64_t staged_at_ = 0;
  int64_t bytes_ = 0;
};

Status CudaExperts::Plan() {
  Measure();
  sort_warps_ = SortWarpsFor(problem_.tokens * problem_.top_k, experts(), context_.shape);
  constexpr int64_t kMostGridRows = 65535;
  if (sort_warps_ == 0 || (experts() + 1) * kMaxSides > kMostGridRows) {
    return Status(Code::kUnsupported,
                  fmt::format("experts: {} are more than a GPU sorts by", experts()));
  }
  MARLIN_RETURN_IF_ERROR(Check(LoadExpertKernels(), "moe_sort"));
  MARLIN_RETURN_IF_ERROR(UploadPresent());
  std::vector<Matrix> up;
  std::vector<Matrix> down;
  up_.sides = layer_.shared_gate != nullptr ? 3 : 2;
  for (int64_t e = 0; e <= experts(); ++e) {
    const ExpertOperands& expert = ExpertAt(e);
    const std::string name = NameOf(e);
    const auto inner = static_cast<int>(expert.inner());
    const int64_t row = e * up_.sides;
    MARLIN_RETURN_IF_ERROR(AddMatrix(name + " gate", expert.gate, row, 0, problem_.x_type, &up));
    MARLIN_RETURN_IF_ERROR(
        AddMatrix(name + " up", expert.up, row + 1, inner, problem_.x_type, &up));
    MARLIN_RETURN_IF_ERROR(AddMatrix(name + " down", expert.down, e, 0, DType::kF32, &down));
  }
  const ExpertOperand score{layer_.shared_gate, 0, nullptr};
  MARLIN_RETURN_IF_ERROR(AddMatrix("shared gate", score, experts() * up_.sides + 2,
                                   static_cast<int>(2 * inner_), problem_.x_type, &up));
  MARLIN_RETURN_IF_ERROR(PlanPhase(up, &up_));
  return PlanPhase(down, &down_);
}

/// Lays out the workspace.
void CudaExperts::Measure() {
  for (int64_t e = 0; e <= experts(); ++e) inner_ = std::max(inner_, ExpertAt(e).inner());
  const int64_t selections = problem_.tokens * problem_.top_k;
  slots_ = selections + (layer_.shared.present() ? problem_.tokens : 0);
  inner_stride_ = RoundUp(2 * inner_ + (layer_.shared_gate != nullptr ? 1 : 0), int64_t{4});
  Layout layout;
  begin_at_ = layout.Add((experts() + 2) * 4);
  token_at_ = layout.Add(slots_ * 4);
  slot_of_at_ = layout.Add(selections * 4);
  inner_at_ = layout.Add(slots_ * inner_stride_ * 4);
  results_at_ = layout.Add(slots_ * layer_.hidden * 4);
  staged_at_ = layout.Add(slots_ * std::max(layer_.hidden, inner_) * 4);
  bytes_ = layout.bytes;
}

template <typename T>
Status CudaExperts::Upload(const std::vector<T>& table, DeviceMemory* memory) const {
  const auto bytes = static_cast<int64_t>(table.size() * sizeof(T));
  MARLIN_ASSIGN_OR_RETURN(*memory, DeviceMemory::Allocate(device_, bytes));
  // Not the default stream, which may not be used while another stream is captured.
  cudaStream_t stream = nullptr;
  MARLIN_RETURN_IF_ERROR(
      Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  cudaError_t copied = cudaMemcpyAsync(memory->data(), table.data(), static_cast<size_t>(bytes),
                                       cudaMemcpyHostToDevice, stream);
  if (copied == cudaSuccess) copied = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return Check(copied, "cudaMemcpy of experts");
}

Status CudaExperts::UploadPresent() {
  std::vector<uint8_t> present;
  for (const ExpertOperands& expert : layer_.experts) present.push_back(expert.present() ? 1 : 0);
  return Upload(present, &present_);
}

std::optional<ExpertGemvPlan> CudaExperts::GemvPlanOf(const Matrix& matrix, int sides) const {
  const int64_t rows = CeilDivide(problem_.tokens * problem_.top_k, experts());
  return PlanExpertGemv({matrix.weights().Tiles(0), matrix.kind(), experts(), sides, rows},
                        context_.shape);
}

/// Appends a matrix, if there is one, with the kernel that runs it.
Status CudaExperts::AddMatrix(const std::string& name, const ExpertOperand& operand, int64_t row,
                              int column, DType a_type, std::vector<Matrix>* matrices) const {
  if (operand.weights == nullptr) return {};
  Matrix matrix;
  matrix.operand = &operand;
  matrix.row = row;
  matrix.column = column;
  matrix.desc = DescribeExpert(problem_, operand, 1, a_type);
  // The memory of operands that the caller made outlives this function as `layer_` does.
  const Support tiles = SupportsTiles(matrix.desc);
  matrix.exact = !tiles.ok() || !GemvPlanOf(matrix, kMaxSides).has_value();
  const Support exact = SupportsExact(matrix.desc, DeviceProperties());
  if (matrix.exact && !exact.ok()) {
    return Status(Code::kUnsupported, fmt::format("{}: no kernel of experts: the GEMV {}, the "
                                                  "exact one {}",
                                                  name, tiles.reason(), exact.reason()));
  }
  matrices->push_back(matrix);
  return {};
}

/// Groups matrices into launches, in the order of their first experts.
Status CudaExperts::PlanPhase(const std::vector<Matrix>& matrices, Phase* phase) const {
  std::vector<std::vector<Matrix>> groups;
  for (const Matrix& matrix : matrices) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return OneLaunch(group.front(), matrix);
    });
    if (found != groups.end()) {
      found->push_back(matrix);
    } else {
      groups.push_back({matrix});
    }
  }
  for (const std::vector<Matrix>& group : groups) {
    ExpertLaunch launch;
    MARLIN_RETURN_IF_ERROR(PlanLaunch(group, phase->sides, &launch));
    phase->launches.push_back(std::move(launch));
  }
  return {};
}

Status CudaExperts::PlanLaunch(const std::vector<Matrix>& matrices, int sides,
                               ExpertLaunch* launch) const {
  const Matrix& first = matrices.front();
  launch->exact = first.exact;
  launch->tiled = first.tiled();
  launch->k = first.desc.k;
  if (!first.exact) return PlanGemv(matrices, sides, launch);
  launch->function = ExactFunctionOf(first.kind(), first.tiled());
  MARLIN_RETURN_IF_ERROR(Check(
      cudaFuncSetAttribute(launch->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           ExactSharedBytes(kExpertExactRows, kMaxExactParts, kMaxExactParts)),
      "moe_expert_gemm_exact"));
  return first.tiled() ? PlanExact<TileView>(matrices, sides, launch)
                       : PlanExact<CanonicalView>(matrices, sides, launch);
}

Status CudaExperts::PlanGemv(const std::vector<Matrix>& matrices, int sides,
                             ExpertLaunch* launch) const {
  const Matrix& first = matrices.front();
  launch->gemv = *GemvPlanOf(first, sides);
  const TileView& shared = launch->gemv.arguments.weights;
  launch->function =
      GemvFunctionOf(first.kind(), first.bf16(), UseOf(shared, first.kind()), launch->gemv.octets);
  MARLIN_RETURN_IF_ERROR(Check(AllowAllShared(launch->function), "moe_expert_gemm"));
  std::vector<TileExpert> table(static_cast<size_t>((experts() + 1) * sides));
  for (const Matrix& matrix : matrices) {
    const TileView view = matrix.weights().Tiles(matrix.operand->index);
    const int exponent = ExponentsOf(matrix.kind(), matrix.bf16()).shift + view.table_exponent;
    table[static_cast<size_t>(matrix.row)] = {view.tiles, matrix.operand->bias,
                                              view.multiplier * std::ldexp(1.0F, exponent), view.n,
                                              matrix.column};
  }
  return Upload(table, &launch->table);
}

template <typename View>
Status CudaExperts::PlanExact(const std::vector<Matrix>& matrices, int sides,
                              ExpertLaunch* launch) const {
  std::vector<ExactExpert<View>> table(static_cast<size_t>((experts() + 1) * sides));
  std::vector<uint8_t> members(static_cast<size_t>(experts() + 1));
  for (const Matrix& matrix : matrices) {
    ExactExpert<View>& expert = table[static_cast<size_t>(matrix.row)];
    if constexpr (std::is_same_v<View, TileView>) {
      expert.weights = matrix.weights().Tiles(matrix.operand->index);
    } else {
      expert.weights = matrix.weights().Canonical(matrix.operand->index);
    }
    expert.bias = matrix.operand->bias;
    expert.column = matrix.column;
    launch->strips = std::max(launch->strips, Ceil(expert.weights.n, kStripOutputs));
    members[static_cast<size_t>(matrix.row / sides)] = 1;
  }
  MARLIN_RETURN_IF_ERROR(Upload(members, &launch->members));
  return Upload(table, &launch->table);
}

Status CudaExperts::Run(const ExpertsCall& call) const {
  MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
  const DeviceScope scope(device_->index);
  std::byte* const workspace = call.workspace;
  const auto words = [&](int64_t at) { return reinterpret_cast<int32_t*>(workspace + at); };
  const Pass pass = {
      call,
      {static_cast<int>(experts()), words(begin_at_), words(token_at_), words(slot_of_at_)},
      reinterpret_cast<float*>(workspace + inner_at_),
      reinterpret_cast<float*>(workspace + results_at_),
      workspace + staged_at_,
      static_cast<cudaStream_t>(call.stream)};
  MARLIN_RETURN_IF_ERROR(Sort(pass));
  bool sorted_early = false;
  ExpertRows x;
  x.data = call.x;
  x.stride = call.x_stride;
  x.type = ElementOf(problem_.x_type);
  MARLIN_RETURN_IF_ERROR(RunPhase(pass, up_, x, pass.inner, inner_stride_, &sorted_early));
  ExpertRows products;
  products.data = pass.inner;
  products.stride = inner_stride_;
  products.type = Element::kF32;
  products.gated = true;
  products.gate = {static_cast<int>(problem_.gate.activation), problem_.gate.limit,
                   problem_.gate.alpha};
  MARLIN_RETURN_IF_ERROR(
      RunPhase(pass, down_, products, pass.results, layer_.hidden, &sorted_early));
  return Sum(pass);
}

Status CudaExperts::Sort(const Pass& pass) const {
  SortArguments args;
  args.ids = pass.call.ids;
  args.tokens = static_cast<int>(problem_.tokens);
  args.top_k = static_cast<int>(problem_.top_k);
  args.present = present_.data();
  args.shared = layer_.shared.present();
  args.warps = sort_warps_;
  args.slots = pass.slots;
  args.errors = errors_.view();
  return Check(LaunchSort(args, pass.stream), "moe_sort");
}

Status CudaExperts::RunPhase(const Pass& pass, const Phase& phase, const ExpertRows& rows,
                             float* out, int64_t out_stride, bool* sorted_early) const {
  for (const ExpertLaunch& launch : phase.launches) {
    if (!launch.exact) {
      MARLIN_RETURN_IF_ERROR(RunGemv(pass, launch, rows, out, out_stride, *sorted_early));
    } else if (launch.tiled) {
      MARLIN_RETURN_IF_ERROR(RunExact<TileView>(pass, launch, phase.sides, rows, out, out_stride));
    } else {
      MARLIN_RETURN_IF_ERROR(
          RunExact<CanonicalView>(pass, launch, phase.sides, rows, out, out_stride));
    }
    *sorted_early = true;
  }
  return {};
}

Status CudaExperts::RunGemv(const Pass& pass, const ExpertLaunch& launch, const ExpertRows& rows,
                            float* out, int64_t out_stride, bool sorted_early) const {
  ExpertGemvArguments args = launch.gemv.arguments;
  args.table = reinterpret_cast<const TileExpert*>(launch.table.data());
  args.sorted_early = sorted_early;
  args.slots = pass.slots;
  args.rows = rows;
  args.out = out;
  args.out_stride = out_stride;
  void* parameters[] = {&args};
  const LaunchSize size = {dim3(static_cast<unsigned>(context_.shape.multiprocessors)),
                           kExpertThreads, launch.gemv.shared_bytes, true};
  return Check(Launch(launch.function, size, parameters, pass.stream), "moe_expert_gemm");
}

template <typename View>
Status CudaExperts::RunExact(const Pass& pass, const ExpertLaunch& launch, int sides,
                             const ExpertRows& rows, float* out, int64_t out_stride) const {
  StageRowsArguments stage;
  stage.rows = rows;
  stage.slots = pass.slots;
  stage.members = launch.members.data();
  stage.k = static_cast<int>(launch.k);
  stage.out = pass.staged;
  if (launch.k > 0) {
    MARLIN_RETURN_IF_ERROR(Check(LaunchStageRows(stage, pass.stream), "moe_stage"));
  }
  ExpertExactArguments<View> args;
  args.table = reinterpret_cast<const ExactExpert<View>*>(launch.table.data());
  args.sides = sides;
  args.slots = pass.slots;
  args.a.data = pass.staged;
  args.a.stride = launch.k;
  args.a.type = rows.gated ? Element::kF32 : rows.type;
  args.out = out;
  args.out_stride = out_stride;
  if (launch.strips == 0) return {};
  void* parameters[] = {&args};
  const LaunchSize size = {
      dim3(static_cast<unsigned>(launch.strips), static_cast<unsigned>((experts() + 1) * sides)),
      32 * kMaxExactParts, ExactSharedBytes(kExpertExactRows, kMaxExactParts, kMaxExactParts),
      true};
  return Check(Launch(launch.function, size, parameters, pass.stream), "moe_expert_gemm_exact");
}

Status CudaExperts::Sum(const Pass& pass) const {
  SumArguments args;
  args.slots = pass.slots;
  args.results = pass.results;
  args.weights = pass.call.weights;
  args.shared = layer_.shared.present();
  args.shared_scores = layer_.shared_gate != nullptr ? pass.inner + 2 * inner_ : nullptr;
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
