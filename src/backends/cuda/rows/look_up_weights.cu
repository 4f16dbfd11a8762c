// Embedding lookup in prepared weights.
#include <algorithm>

#include "backends/cuda/common/marlin_w4.cuh"
#include "backends/cuda/common/sparse_reader.cuh"
#include "backends/cuda/decoder/views.h"
#include "backends/cuda/rows/look_up_weights.cuh"
#include "backends/cuda/weights/prepared_tiles.h"

namespace marlin::cuda {
namespace {

template <typename Reader>
cudaError_t Start(const Reader& reader, const LookUpWeightsArguments& args, cudaStream_t stream) {
  const int64_t of_columns =
      std::clamp<int64_t>((args.columns + kLookUpThreads - 1) / kLookUpThreads, 1, 64);
  const dim3 grid(static_cast<unsigned>(args.out.rows), static_cast<unsigned>(of_columns));
  return LaunchInChain(&LookUpWeightsKernel<Reader>, grid, kLookUpThreads, 0, stream, reader, args);
}

}  // namespace

Status Run(const LookUpWeightRowsCall& call, const CallContext& context) {
  const auto& weights = static_cast<const PreparedTiles&>(call.table);
  const LookUpWeightsArguments args = {IndicesOf(call.ids), RowsOf(call.out), call.out.dim(1),
                                       call.table.spec.n, context.errors};
  const auto start = [&](const auto& reader) {
    return context.Check(Start(reader, args, context.stream), "lookup");
  };
  if (weights.traits.marlin_w4) {
    const MarlinW4View view = weights.MarlinW4(0);
    return start(MarlinW4Reader{view, view.codes});
  }
  if (!weights.traits.tiled) return start(CanonicalReader{weights.Canonical(0)});
  if (weights.traits.sparse) return start(SparseTileReader{weights.Tiles(0), weights.kind()});
  return start(TileReader{weights.Tiles(0), weights.kind()});
}

}  // namespace marlin::cuda
