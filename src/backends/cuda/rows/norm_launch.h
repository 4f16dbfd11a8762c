// The launches of the kernels of norms.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/decoder/decoder_layout.h"

namespace marlin::cuda {

/// From this many rows on, a row has a warp instead of a CTA: as many CTAs as an H200 has at once,
/// twice.
inline constexpr int64_t kManyNormRows = 528;

/// out = norm(x), after x += block if there is one.
struct RmsNormArguments {
  RowsView x;
  RowsView block;  ///< Null data: none.
  RowsView out;
  const void* weight = nullptr;
  Element weight_type = Element::kF32;
  int columns = 0;
  float epsilon = 0;

  MARLIN_HOST_DEVICE bool adds() const { return block.data != nullptr; }
};

/// Whether rows are read as vectors of fp32 and stored as vectors.
bool HasVectorRows(const RmsNormArguments& args);

/// Each Load prepares the kernels of the launch below it.
cudaError_t LoadNorm();
cudaError_t LaunchNorm(const RmsNormArguments& args, cudaStream_t stream);

/// A warp has a row. The same bits; for rows that it takes alone.
cudaError_t LoadNormRows();
bool TakesNormRows(const RmsNormArguments& args);
cudaError_t LaunchNormRows(const RmsNormArguments& args, cudaStream_t stream);

/// x -= the mean of each row.
cudaError_t LoadCenterRows();
cudaError_t LaunchCenterRows(const RowsView& x, int columns, cudaStream_t stream);

}  // namespace marlin::cuda
