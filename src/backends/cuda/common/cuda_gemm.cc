#include "backends/cuda/common/cuda_gemm.h"

#include <cmath>

#include "backends/cuda/gemm/fp8/fp8_quantize.h"
#include "backends/cuda/plan/kernel_table.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// Rows of staged activations are padded to multiples of 16 bytes.
int StagedColumns(const GemmDesc& desc) { return static_cast<int>(RoundUp(desc.k, int64_t{8})); }

int64_t StagedBytes(const GemmDesc& desc) {
  if (!NeedsStaging(desc)) return 0;
  return RoundUp(desc.m * StagedColumns(desc) * 2, kWorkspaceAlignment);
}

}  // namespace

Element ElementOf(DType type) {
  if (type == DType::kBf16) return Element::kBf16;
  if (type == DType::kF8E4M3) return Element::kE4M3;
  return type == DType::kF16 ? Element::kF16 : Element::kF32;
}

ActivationView ActivationsOf(const GemmCall& call) {
  return {call.a, call.a_stride, ElementOf(call.desc.a_type), static_cast<int>(call.desc.m),
          static_cast<int>(call.desc.k)};
}

// Activate in epilogue.cuh switches on these numbers.
static_assert(static_cast<int>(Activation::kNone) == 0);
static_assert(static_cast<int>(Activation::kSilu) == 1);
static_assert(static_cast<int>(Activation::kGeluTanh) == 2);
static_assert(static_cast<int>(Activation::kRelu) == 3);

EpilogueView EpilogueOf(const GemmCall& call) {
  EpilogueView view;
  view.out = call.c;
  view.stride = call.c_stride;
  view.type = ElementOf(call.desc.c_type);
  view.bias = call.epilogue.bias;
  view.bias_type = ElementOf(call.epilogue.bias_type);
  view.activation = static_cast<int>(call.desc.activation);
  view.gated = call.desc.gated;
  view.row_weight = call.epilogue.row_weight;
  view.n = static_cast<int>(call.desc.n);
  return view;
}

Status CudaGemm::Run(const GemmCall& call) const {
  MARLIN_RETURN_IF_ERROR(context_.device.errors.Lost());
  const DeviceScope scope(context_.device.index);
  return Launch(call, static_cast<cudaStream_t>(call.stream));
}

Status CudaGemm::RunBatch(std::span<const GemmCall> calls, int64_t /*workspace_bytes*/) const {
  for (size_t i = 0; i < calls.size(); ++i) {
    GemmCall call = calls[i];
    if (i > 0) call.overlap_previous = true;
    MARLIN_RETURN_IF_ERROR(Run(call));
  }
  return {};
}

TilesGemm::TilesGemm(const PlanRequest& request, const KernelVariant& variant, int64_t own_bytes)
    : CudaGemm(request, variant, StagedBytes(request.desc) + own_bytes),
      kind_(request.weights.kind()),
      quantizes_(request.desc.accuracy == Accuracy::kW4A8),
      bf16_(quantizes_ || request.desc.a_type != DType::kF16 || !request.desc.weights.fits_f16),
      staged_(NeedsStaging(request.desc)) {}

Status TilesGemm::Launch(const GemmCall& call, cudaStream_t stream) const {
  const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
  TileGemm gemm;
  gemm.weights = prepared.traits.marlin_w4 ? prepared.MarlinW4(call.expert).codes
                                           : prepared.Tiles(call.expert);
  gemm.kind = kind_;
  gemm.bf16 = bf16_;
  gemm.a = ActivationsOf(call);
  gemm.epilogue = EpilogueOf(call);
  gemm.epilogue.multiplier =
      gemm.weights.multiplier *
      std::ldexp(1.0F, ExponentsOf(kind_, bf16_).shift + gemm.weights.table_exponent);
  gemm.overlap_previous = call.overlap_previous;
  auto* workspace = static_cast<uint8_t*>(call.workspace);
  if (staged_) {
    const int columns = StagedColumns(call.desc);
    const cudaError_t staged =
        quantizes_ ? LaunchRoundRows(gemm.a, workspace, columns, stream)
                   : LaunchStageActivations(gemm.a, workspace, columns, bf16_, stream);
    MARLIN_RETURN_IF_ERROR(Check(staged));
    gemm.a.data = workspace;
    gemm.a.stride = columns;
    workspace += StagedBytes(call.desc);
  }
  gemm.partials = reinterpret_cast<float*>(workspace);
  return LaunchTiles(call, gemm, stream);
}

}  // namespace marlin::cuda
