// The arguments of decoder calls as kernels take them: plain structs, by value.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/decoder/operations.h"

namespace marlin::cuda {

/// Precondition: rank 2 or 3. Kernels write the rows of outputs only.
RowsView RowsOf(const TensorView& view);
IndexView IndicesOf(const TensorView& view);
RotaryView RotaryOf(const RotaryEmbedding& rotary);
SequencesView SequencesOf(const SequenceRows& rows);

/// The workspace of PagesOf: a table of the slabs that do not fit in a kernel's parameters.
int64_t SlabTableBytes(const PagedCache& cache);
/// Describes a cache, and copies its table of slabs to the front of the workspace. Errors:
/// cudaErrorStreamCaptureUnsupported if a captured stream would have to copy a table.
cudaError_t PagesOf(const PagedCache& cache, const CallContext& context, PagesView* pages);

/// Kernels copy rows of a cache in pieces of this many bytes.
inline constexpr int64_t kCacheAlignment = 16;
bool SlabsAreAligned(const PagedCache& cache);

}  // namespace marlin::cuda
