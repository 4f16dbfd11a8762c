// Launches of the decoder operations that are not GEMMs. Each puts kernels on a stream and returns
// the launch error; none allocates or synchronizes.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// out[r] = from[ids[r]], or from[r] without ids.
struct CopyRowsArguments {
  RowsView from;
  RowsView out;
  IndexView ids;
  int64_t columns = 0;
  ErrorView errors;
};
cudaError_t LaunchCopyRows(const CopyRowsArguments& args, cudaStream_t stream);

/// out[r] = the weights of output ids[r]. The reader is one of three layouts.
struct LookUpWeightsArguments {
  IndexView ids;
  RowsView out;
  int64_t columns = 0;
  int64_t outputs = 0;
  ErrorView errors;
};
cudaError_t LaunchLookUpTiles(const TileView& weights, CodeKind kind,
                              const LookUpWeightsArguments& args, cudaStream_t stream);
cudaError_t LaunchLookUpSparse(const TileView& weights, CodeKind kind,
                               const LookUpWeightsArguments& args, cudaStream_t stream);
cudaError_t LaunchLookUpCanonical(const CanonicalView& weights, const LookUpWeightsArguments& args,
                                  cudaStream_t stream);
cudaError_t LaunchLookUpMarlinW4(const MarlinW4View& weights, const LookUpWeightsArguments& args,
                                 cudaStream_t stream);

/// Load<Kernels> of this header prepare kernels: call each once, before the first launch.
cudaError_t LoadRowKernels();
cudaError_t LoadRmsNorm();
cudaError_t LoadRotateAppend();
cudaError_t LoadDecodeAttention();
cudaError_t LoadPrefillAttention();

/// out = norm(x), after x += block if there is one.
struct RmsNormArguments {
  RowsView x;
  RowsView block;  ///< Null data: none.
  RowsView out;
  const void* weight = nullptr;
  Element weight_type = Element::kF32;
  int columns = 0;
  float epsilon = 0;
};
cudaError_t LaunchRmsNorm(const RmsNormArguments& args, cudaStream_t stream);

/// x += scale * y.
struct AddToArguments {
  RowsView y;
  RowsView x;
  int64_t columns = 0;
  float scale = 1;
};
cudaError_t LaunchAddTo(const AddToArguments& args, cudaStream_t stream);

struct ApplyGateArguments {
  RowsView gate;
  RowsView up;
  RowsView out;
  int64_t columns = 0;
  GateView options;
};
cudaError_t LaunchApplyGate(const ApplyGateArguments& args, cudaStream_t stream);
cudaError_t LaunchSigmoid(const RowsView& x, int64_t columns, cudaStream_t stream);
cudaError_t LaunchRotary(const RotaryArguments& args, cudaStream_t stream);

cudaError_t LaunchAppend(const AppendArguments& args, cudaStream_t stream);
/// Features of a head that a warp holds, at most.
inline constexpr int kMostRotateFeatures = 512;
/// Precondition: key_dim is at most kMostRotateFeatures.
cudaError_t LaunchRotateAppend(const RotateAppendArguments& args, cudaStream_t stream);

/// Call it before the first LaunchAttention.
cudaError_t LoadAttention();
cudaError_t LaunchAttention(const AttentionArguments& args, cudaStream_t stream);
/// On matrix units, for few and for many tokens of a sequence. Preconditions: a bf16 or e4m3 cache
/// with values of its own, aligned to 16 bytes; heads of multiples of 16 features, up to
/// kMostMatrixFeatures.
cudaError_t LaunchDecodeAttention(const AttentionArguments& args, cudaStream_t stream);
cudaError_t LaunchPrefillAttention(const AttentionArguments& args, cudaStream_t stream);

cudaError_t LaunchResetSampler(const ResetArguments& args, cudaStream_t stream);
cudaError_t LaunchSample(const SampleArguments& args, cudaStream_t stream);
cudaError_t LaunchAdvance(const AdvanceArguments& args, cudaStream_t stream);
/// Prepares LaunchAdvance, as those above.
cudaError_t LoadAdvance();

}  // namespace marlin::cuda
