// The plan of one GEMM on a CUDA device: the base class of every kernel family's plan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "backends/cuda/weights/prepared_tiles.h"
#include "plan/gemm/backend.h"

namespace marlin::cuda {

class CublasHandle;

/// The parts of a device that launches use; they outlive every plan.
struct LaunchContext {
  DeviceHandle& device;
  const DeviceShape& shape;
  SplitKScratch& scratch;
  CublasHandle& cublas;
};

struct PlanRequest {
  const KernelDesc& kernel;
  const GemmDesc& desc;
  KernelVariant variant;
  const PreparedTiles& weights;
  const LaunchContext& context;
};

/// Make<Family> of kernels.def.
using MakeGemm = Result<std::shared_ptr<const PlannedGemm>> (*)(const PlanRequest& request);

/// Alignment, in bytes, of the parts of the caller's workspace.
inline constexpr int64_t kWorkspaceAlignment = 256;

class CudaGemm : public PlannedGemm {
 public:
  CudaGemm(const PlanRequest& request, const KernelVariant& variant, int64_t workspace_bytes)
      : PlannedGemm(request.kernel, variant, workspace_bytes), context_(request.context) {}

  /// Makes the device current, launches, and latches the error of a device that is lost.
  Status Run(const GemmCall& call) const final;
  /// One launch per matrix (docs/decisions/0029-batches.md); each overlaps the previous one by PDL.
  Status RunBatch(std::span<const GemmCall> calls, int64_t workspace_bytes) const final;

 protected:
  virtual Status Launch(const GemmCall& call, cudaStream_t stream) const = 0;
  Status Check(cudaError_t error) const {
    return context_.device.errors.Check(error, kernel().name);
  }
  const LaunchContext& context() const { return context_; }

 private:
  const LaunchContext& context_;
};

/// The element of an activation type.
Element ElementOf(DType type);
ActivationView ActivationsOf(const GemmCall& call);
EpilogueView EpilogueOf(const GemmCall& call);

/// A GEMM with tiled weights. Activations that the kernels cannot read in place are staged in the
/// workspace, quantized for Accuracy::kW4A8; the kernel family uses the rest of it.
class TilesGemm : public CudaGemm {
 public:
  /// `own_bytes`: workspace of the kernel family, without the staged activations.
  TilesGemm(const PlanRequest& request, const KernelVariant& variant, int64_t own_bytes);

 protected:
  Status Launch(const GemmCall& call, cudaStream_t stream) const final;
  /// `gemm` is complete except for scratch memory; gemm.partials is the family's workspace.
  virtual Status LaunchTiles(const GemmCall& call, const TileGemm& gemm,
                             cudaStream_t stream) const = 0;

  CodeKind kind() const { return kind_; }
  bool bf16() const { return bf16_; }

 private:
  const CodeKind kind_;
  const bool quantizes_;
  const bool bf16_;  ///< MMA operands are bf16, not fp16.
  const bool staged_;
};

}  // namespace marlin::cuda
