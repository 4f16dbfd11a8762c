// The launches that run the GEMMs of a layer's experts: which kernel takes which matrices.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/moe/experts/experts_plan.h"
#include "backends/cuda/runtime/device_memory.h"
#include "plan/moe/experts.h"

namespace marlin::cuda {

enum class ExpertKernel : uint8_t {
  kGemv,   ///< Few rows; gathers rows and activates gates as it loads them.
  kWgmma,  ///< Many rows, which have been staged.
  kMma,    ///< The same without WGMMA; rows of its type are read where they lie.
  kExact,  ///< Everything else, also staged.
};

/// The layout of the weights of an exact launch.
enum class ExactWeights : uint8_t { kCanonical, kTiles, kSparseTiles };

/// One launch: its function, and its parameters except for pointers into the workspace.
struct ExpertLaunch {
  ExpertKernel kernel = ExpertKernel::kGemv;
  const void* function = nullptr;
  ExpertGemvPlan gemv;
  ExpertWgmmaPlan wgmma;
  ExpertMmaPlan mma;
  DeviceMemory table;
  DeviceMemory members;  ///< StageRowsArguments::members; empty for the GEMV kernel.
  int64_t k = 0;
  bool bf16 = true;  ///< WGMMA and MMA: operands are bf16, not fp16.
  ExactWeights exact = ExactWeights::kTiles;
  int strips = 0;  ///< Exact: n-tiles of the widest matrix.
};

/// The GEMMs before the activation, or those after it.
struct ExpertPhase {
  int sides = 1;
  std::vector<ExpertLaunch> launches;
};

struct ExpertPhases {
  ExpertPhase up;
  ExpertPhase down;
  /// The launch of the gates and ups computes the gated activation, and all downs read that.
  bool fused = false;
  /// Every launch sorts the selections itself; otherwise there is a launch that does.
  bool sorts_itself = false;
  int64_t inner = 0;         ///< The widest expert's.
  int64_t score_column = 0;  ///< Column of the shared expert's score in the results of `up`.
};

/// Plans the launches of a layer; their tables lie in device memory. Errors: kUnsupported naming
/// the matrix that no kernel takes, kOutOfMemory, kDeviceLost.
Result<ExpertPhases> PlanExpertPhases(const LaunchContext& context,
                                      const std::shared_ptr<DeviceHandle>& device,
                                      const ExpertsProblem& problem, const LayerExperts& layer);

/// Copies bytes to device memory, also while a stream is captured.
Result<DeviceMemory> UploadBytes(const std::shared_ptr<DeviceHandle>& device, const void* data,
                                 int64_t bytes);
template <typename T>
Result<DeviceMemory> UploadTable(const std::shared_ptr<DeviceHandle>& device,
                                 const std::vector<T>& table) {
  return UploadBytes(device, table.data(), static_cast<int64_t>(table.size() * sizeof(T)));
}

}  // namespace marlin::cuda
