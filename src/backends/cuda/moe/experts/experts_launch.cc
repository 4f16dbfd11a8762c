#include "backends/cuda/moe/experts/experts_launch.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "backends/cuda/common/launch.h"
#include "backends/cuda/gemm/exact/exact_layout.h"
#include "backends/cuda/layout/sparse_layout.h"
#include "backends/cuda/plan/kernel_family.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

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
  TileKind tile_kind() const { return weights().tile_kind(); }
  CodeKind kind() const { return weights().kind(); }
  ExactWeights exact_weights() const {
    if (!weights().traits.tiled) return ExactWeights::kCanonical;
    return tile_kind().sparse ? ExactWeights::kSparseTiles : ExactWeights::kTiles;
  }
  bool bf16() const { return desc.a_type != DType::kF16 || !desc.weights.fits_f16; }

  TileExpert Describe() const {
    const TileView view = weights().Tiles(operand->index);
    const int exponent = ExponentsOf(kind(), bf16()).shift + view.table_exponent;
    return {view.tiles, operand->bias, view.multiplier * std::ldexp(1.0F, exponent), view.n,
            column};
  }
};
using Matrices = std::vector<Matrix>;

using ManyRowsPlan = std::variant<ExpertWgmmaPlan, ExpertMmaPlan>;

/// Whether one launch of a kernel on tiles can run both.
bool SameTiles(const Matrix& a, const Matrix& b) {
  if (a.tile_kind() != b.tile_kind() || a.bf16() != b.bf16()) return false;
  if (a.desc.format != b.desc.format && a.kind() != CodeKind::kFp4) return false;
  const TileView x = a.weights().Tiles(0);
  const TileView y = b.weights().Tiles(0);
  const bool same_values = a.desc.format != Format::kCodebook4 || x.values == y.values;
  return same_values && SameTileLayout(x, y);
}

/// The exact kernel reads everything else from the table.
bool SameExact(const Matrix& a, const Matrix& b) {
  return a.kind() == b.kind() && a.exact_weights() == b.exact_weights() && a.desc.k == b.desc.k;
}

bool OneLaunch(const Matrix& a, const Matrix& b) {
  if (a.exact != b.exact) return false;
  return a.exact ? SameExact(a, b) : SameTiles(a, b);
}

/// The ups of a matrix that holds gates and ups begin at a whole pair of n-tiles where the kernel
/// that activates them reads both.
constexpr int64_t kPairOutputs = 2 * kStripOutputs;

class Planner {
 public:
  Planner(const LaunchContext& context, const std::shared_ptr<DeviceHandle>& device,
          const ExpertsProblem& problem, const LayerExperts& layer)
      : context_(context), device_(device), problem_(problem), layer_(layer) {
    for (const ExpertOperands& expert : layer.experts) {
      matrix_weights_ = std::max(matrix_weights_, layer.hidden * expert.inner());
    }
  }

  Result<ExpertPhases> Plan();

 private:
  int64_t experts() const { return static_cast<int64_t>(layer_.experts.size()); }
  const ExpertOperands& ExpertAt(int64_t e) const {
    return e < experts() ? layer_.experts[static_cast<size_t>(e)] : layer_.shared;
  }
  std::string NameOf(int64_t e) const {
    return e < experts() ? fmt::format("expert {}", e) : std::string("shared expert");
  }
  Status Check(cudaError_t error, const char* what) const {
    return device_->errors.Check(error, what);
  }
  ExpertTilesProblem TilesOf(const Matrix& matrix, int sides) const {
    const int64_t rows = CeilDivide(problem_.tokens * problem_.top_k, experts());
    const int64_t sort = MaySortThemselves() ? OwnSortBytes(problem_.tokens) : 0;
    const TileView weights = matrix.weights().Tiles(0);
    return {weights,         matrix.kind(), experts(), sides,
            matrix_weights_, rows,          sort,      UseOf(weights, matrix.kind())};
  }
  bool MaySortThemselves() const {
    return problem_.tokens * problem_.top_k <= kMostOwnSelections && experts() <= kMostOwnExperts;
  }
  /// Rows of the GEMV kernel or of another have other sums.
  bool MayHaveManyRows() const { return problem_.determinism != Determinism::kBatchInvariant; }
  /// The plan of the large-M kernel, WGMMA or MMA, if that takes the matrix.
  std::optional<ManyRowsPlan> ManyRowsPlanOf(const Matrix& matrix, int sides, bool gated) const {
    if (matrix.exact || !MayHaveManyRows()) return std::nullopt;
    const ExpertTilesProblem tiles = TilesOf(matrix, sides);
    if (auto plan = PlanExpertWgmma(tiles, gated, context_.shape)) return *plan;
    if (auto plan = PlanExpertMma(tiles, gated, context_.shape)) return *plan;
    return std::nullopt;
  }

  Status AddMatrix(const std::string& name, const ExpertOperand& operand, int64_t row,
                   int64_t column, DType a_type, Matrices* matrices) const;
  bool CanFuse(const Matrices& up, const Matrices& down) const;
  Status PlanFused(const Matrices& up, ExpertLaunch* launch) const;
  Status PlanPhase(const Matrices& matrices, ExpertPhase* phase) const;
  Status PlanLaunch(const Matrices& matrices, int sides, ExpertLaunch* launch) const;
  Status PlanTiles(const Matrices& matrices, int sides, ExpertLaunch* launch) const;
  Status PlanManyRows(const Matrix& first, const ManyRowsPlan& plan, ExpertLaunch* launch) const;
  template <typename View>
  Status PlanExact(const Matrices& matrices, int sides, ExpertLaunch* launch) const;
  template <typename T>
  Status Upload(const std::vector<T>& table, DeviceMemory* memory) const {
    MARLIN_ASSIGN_OR_RETURN(*memory, UploadTable(device_, table));
    return {};
  }
  Status UploadMembers(const Matrices& matrices, int sides, ExpertLaunch* launch) const;

  const LaunchContext& context_;
  const std::shared_ptr<DeviceHandle>& device_;
  const ExpertsProblem& problem_;
  const LayerExperts& layer_;
  int64_t matrix_weights_ = 0;
};

/// Whether there are launches, all of the GEMV kernel with threads enough to sort the selections.
bool AllCanSort(const ExpertPhase& phase, int64_t selections) {
  const auto can = [&](const ExpertLaunch& launch) {
    return launch.kernel == ExpertKernel::kGemv &&
           selections * kThreadsOfSelection <= 32 * launch.gemv.arguments.warps;
  };
  return !phase.launches.empty() && std::ranges::all_of(phase.launches, can);
}

Result<ExpertPhases> Planner::Plan() {
  ExpertPhases phases;
  Matrices up;
  Matrices down;
  phases.up.sides = layer_.shared_gate != nullptr ? 3 : 2;
  for (int64_t e = 0; e <= experts(); ++e) {
    const ExpertOperands& expert = ExpertAt(e);
    const std::string name = NameOf(e);
    const int64_t row = e * phases.up.sides;
    phases.inner = std::max(phases.inner, expert.inner());
    MARLIN_RETURN_IF_ERROR(AddMatrix(name + " gate", expert.gate, row, 0, problem_.x_type, &up));
    MARLIN_RETURN_IF_ERROR(
        AddMatrix(name + " up", expert.up, row + 1, expert.inner(), problem_.x_type, &up));
    MARLIN_RETURN_IF_ERROR(AddMatrix(name + " down", expert.down, e, 0, DType::kF32, &down));
  }
  phases.fused = CanFuse(up, down);
  if (phases.fused) {
    MARLIN_RETURN_IF_ERROR(PlanFused(up, &phases.up.launches.emplace_back()));
    up.clear();
  }
  phases.score_column = phases.fused ? 0 : 2 * phases.inner;
  const ExpertOperand score{layer_.shared_gate, 0, nullptr};
  MARLIN_RETURN_IF_ERROR(AddMatrix("shared gate", score, experts() * phases.up.sides + 2,
                                   phases.score_column, problem_.x_type, &up));
  MARLIN_RETURN_IF_ERROR(PlanPhase(up, &phases.up));
  MARLIN_RETURN_IF_ERROR(PlanPhase(down, &phases.down));
  const int64_t selections = problem_.tokens * problem_.top_k;
  phases.sorts_itself = MaySortThemselves() && AllCanSort(phases.up, selections) &&
                        AllCanSort(phases.down, selections);
  return phases;
}

/// Appends a matrix, if there is one, with the kernel that runs it.
Status Planner::AddMatrix(const std::string& name, const ExpertOperand& operand, int64_t row,
                          int64_t column, DType a_type, Matrices* matrices) const {
  if (operand.weights == nullptr) return {};
  Matrix matrix;
  matrix.operand = &operand;
  matrix.row = row;
  matrix.column = static_cast<int>(column);
  matrix.desc = DescribeExpert(problem_, operand, 1, a_type);
  const Support tiles = SupportsTiles(matrix.desc, matrix.tile_kind().sparse);
  matrix.exact =
      !tiles.ok() || !PlanExpertGemv(TilesOf(matrix, kMaxSides), context_.shape).has_value();
  const Support exact = SupportsExact(matrix.desc, DeviceProperties());
  if (matrix.exact && !exact.ok()) {
    return Status(Code::kUnsupported, fmt::format("{}: no kernel of experts: the GEMV {}, the "
                                                  "exact one {}",
                                                  name, tiles.reason(), exact.reason()));
  }
  matrices->push_back(matrix);
  return {};
}

/// Whether one launch of a large-M kernel can run all gates and ups and activate them, and
/// such launches all downs.
bool Planner::CanFuse(const Matrices& up, const Matrices& down) const {
  if (up.empty() || !ManyRowsPlanOf(up.front(), 2, true)) return false;
  for (int64_t e = 0; e <= experts(); ++e) {
    const ExpertOperands& expert = ExpertAt(e);
    const bool stacked = expert.up.weights == nullptr;
    if (stacked && expert.inner() % kPairOutputs != 0) return false;
  }
  return std::ranges::all_of(up, [&](const Matrix& m) { return OneLaunch(up.front(), m); }) &&
         std::ranges::all_of(
             down, [&](const Matrix& m) { return ManyRowsPlanOf(m, 1, false).has_value(); });
}

Status Planner::PlanFused(const Matrices& up, ExpertLaunch* launch) const {
  const int sides = layer_.shared_gate != nullptr ? 3 : 2;
  std::vector<TileExpert> table(static_cast<size_t>((experts() + 1) * 2));
  for (const Matrix& matrix : up) {
    const int64_t e = matrix.row / sides;
    const auto at = static_cast<size_t>(e * 2 + matrix.row % sides);
    TileExpert& expert = table[at] = matrix.Describe();
    if (ExpertAt(e).up.weights != nullptr) continue;
    expert.n /= 2;
    TileExpert& half = table[at + 1] = expert;
    half.strip = expert.n / kStripOutputs;
    if (expert.bias != nullptr) half.bias = expert.bias + expert.n;
  }
  MARLIN_RETURN_IF_ERROR(UploadMembers(up, sides, launch));
  MARLIN_RETURN_IF_ERROR(Upload(table, &launch->table));
  return PlanManyRows(up.front(), *ManyRowsPlanOf(up.front(), 2, true), launch);
}

/// Groups matrices into launches, in the order of their first experts.
Status Planner::PlanPhase(const Matrices& matrices, ExpertPhase* phase) const {
  std::vector<Matrices> groups;
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
  for (const Matrices& group : groups) {
    MARLIN_RETURN_IF_ERROR(PlanLaunch(group, phase->sides, &phase->launches.emplace_back()));
  }
  return {};
}

Status Planner::PlanLaunch(const Matrices& matrices, int sides, ExpertLaunch* launch) const {
  const Matrix& first = matrices.front();
  launch->k = first.desc.k;
  if (!first.exact) return PlanTiles(matrices, sides, launch);
  launch->kernel = ExpertKernel::kExact;
  launch->exact = first.exact_weights();
  launch->function = FunctionOf<ExpertExactKernels>(first.tile_kind(),
                                                    {launch->exact != ExactWeights::kCanonical});
  MARLIN_RETURN_IF_ERROR(Check(
      cudaFuncSetAttribute(launch->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           ExactSharedBytes(kExpertExactRows, kMaxExactParts, kMaxExactParts)),
      "moe_expert_gemm_exact"));
  MARLIN_RETURN_IF_ERROR(UploadMembers(matrices, sides, launch));
  switch (launch->exact) {
    case ExactWeights::kCanonical:
      return PlanExact<CanonicalView>(matrices, sides, launch);
    case ExactWeights::kSparseTiles:
      return PlanExact<SparseTileView>(matrices, sides, launch);
    default:
      return PlanExact<TileView>(matrices, sides, launch);
  }
}

Status Planner::PlanTiles(const Matrices& matrices, int sides, ExpertLaunch* launch) const {
  const Matrix& first = matrices.front();
  std::vector<TileExpert> table(static_cast<size_t>((experts() + 1) * sides));
  for (const Matrix& matrix : matrices) {
    table[static_cast<size_t>(matrix.row)] = matrix.Describe();
  }
  MARLIN_RETURN_IF_ERROR(Upload(table, &launch->table));
  if (const auto plan = ManyRowsPlanOf(first, sides, false)) {
    MARLIN_RETURN_IF_ERROR(UploadMembers(matrices, sides, launch));
    return PlanManyRows(first, *plan, launch);
  }
  launch->gemv = *PlanExpertGemv(TilesOf(first, sides), context_.shape);
  const TileView& shared = launch->gemv.arguments.weights;
  launch->function = FunctionOf<ExpertGemvKernels>(
      first.tile_kind(), {first.bf16(), UseOf(shared, first.kind()), launch->gemv.octets});
  return Check(AllowAllShared(launch->function), "moe_expert_gemm");
}

Status Planner::PlanManyRows(const Matrix& first, const ManyRowsPlan& plan,
                             ExpertLaunch* launch) const {
  launch->k = first.desc.k;
  launch->bf16 = first.bf16();
  const ParameterUse use = UseOf(first.weights().Tiles(0), first.kind());
  if (const auto* const wgmma = std::get_if<ExpertWgmmaPlan>(&plan)) {
    launch->kernel = ExpertKernel::kWgmma;
    launch->wgmma = *wgmma;
    launch->function = FunctionOf<ExpertWgmmaKernels>(first.tile_kind(), {first.bf16(), use});
  } else {
    launch->kernel = ExpertKernel::kMma;
    launch->mma = std::get<ExpertMmaPlan>(plan);
    const int rows = launch->mma.arguments.tile_rows;
    launch->function = FunctionOf<ExpertMmaKernels>(first.tile_kind(), {first.bf16(), use, rows});
  }
  MARLIN_RETURN_IF_ERROR(Check(AllowAllShared(launch->function), "moe_expert_gemm"));
  if (launch->kernel == ExpertKernel::kWgmma) return {};
  MARLIN_RETURN_IF_ERROR(Check(PreferShared(launch->function), "moe_expert_gemm"));
  // Registers may allow fewer CTAs; then more of them would only begin when others have ended.
  int fit = 0;
  MARLIN_RETURN_IF_ERROR(Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                                   &fit, launch->function, launch->mma.arguments.Threads(),
                                   static_cast<size_t>(launch->mma.shared_bytes)),
                               "moe_expert_gemm"));
  launch->mma.resident = std::clamp(fit, 1, launch->mma.resident);
  return {};
}

template <typename View>
Status Planner::PlanExact(const Matrices& matrices, int sides, ExpertLaunch* launch) const {
  std::vector<ExactExpert<View>> table(static_cast<size_t>((experts() + 1) * sides));
  for (const Matrix& matrix : matrices) {
    ExactExpert<View>& expert = table[static_cast<size_t>(matrix.row)];
    if constexpr (std::is_same_v<View, TileView>) {
      expert.weights = matrix.weights().Tiles(matrix.operand->index);
    } else if constexpr (std::is_same_v<View, SparseTileView>) {
      expert.weights = {matrix.weights().Tiles(matrix.operand->index),
                        matrix.weights().zero_code()};
    } else {
      expert.weights = matrix.weights().Canonical(matrix.operand->index);
    }
    expert.bias = matrix.operand->bias;
    expert.column = matrix.column;
    launch->strips = std::max(launch->strips, Ceil(expert.weights.n, kStripOutputs));
  }
  return Upload(table, &launch->table);
}

Status Planner::UploadMembers(const Matrices& matrices, int sides, ExpertLaunch* launch) const {
  std::vector<uint8_t> members(static_cast<size_t>(experts() + 1));
  for (const Matrix& matrix : matrices) members[static_cast<size_t>(matrix.row / sides)] = 1;
  return Upload(members, &launch->members);
}

}  // namespace

Result<ExpertPhases> PlanExpertPhases(const LaunchContext& context,
                                      const std::shared_ptr<DeviceHandle>& device,
                                      const ExpertsProblem& problem, const LayerExperts& layer) {
  return Planner(context, device, problem, layer).Plan();
}

Result<DeviceMemory> UploadBytes(const std::shared_ptr<DeviceHandle>& device, const void* data,
                                 int64_t bytes) {
  MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device, bytes));
  // Not the default stream, which may not be used while another stream is captured.
  cudaStream_t stream = nullptr;
  MARLIN_RETURN_IF_ERROR(device->errors.Check(
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  cudaError_t copied = cudaMemcpyAsync(memory.data(), data, static_cast<size_t>(bytes),
                                       cudaMemcpyHostToDevice, stream);
  if (copied == cudaSuccess) copied = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  MARLIN_RETURN_IF_ERROR(device->errors.Check(copied, "cudaMemcpy of experts"));
  return memory;
}

}  // namespace marlin::cuda
