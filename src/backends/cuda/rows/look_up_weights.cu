// Embedding lookup in prepared weights.
#include <algorithm>

#include "backends/cuda/common/marlin_w4.cuh"
#include "backends/cuda/common/sparse_reader.cuh"
#include "backends/cuda/decoder/views.h"
#include "backends/cuda/rows/look_up_weights.cuh"
#include "backends/cuda/weights/prepared_tiles.h"

namespace marlin::cuda {
namespace {

/// A CTA has a row and `columns` of it, or more where there are many.
dim3 GridOf(const LookUpWeightsArguments& args, int64_t columns) {
  const int64_t of_columns = std::clamp<int64_t>((args.columns + columns - 1) / columns, 1, 64);
  return {static_cast<unsigned>(args.out.rows), static_cast<unsigned>(of_columns)};
}

template <typename Reader>
cudaError_t Start(const Reader& reader, const LookUpWeightsArguments& args, cudaStream_t stream) {
  return LaunchInChain(&LookUpWeightsKernel<Reader>, GridOf(args, kLookUpThreads), kLookUpThreads,
                       0, stream, reader, args);
}

/// The kinds with codes of eight bits are read alike: their values are in a table.
auto* TilesKernelOf(CodeKind kind) {
  switch (kind) {
    case CodeKind::kFp4:
      return &LookUpTilesKernel<CodeKind::kFp4>;
    case CodeKind::kInt4:
      return &LookUpTilesKernel<CodeKind::kInt4>;
    case CodeKind::kTable4:
      return &LookUpTilesKernel<CodeKind::kTable4>;
    case CodeKind::kTable3:
      return &LookUpTilesKernel<CodeKind::kTable3>;
    case CodeKind::kTable2:
      return &LookUpTilesKernel<CodeKind::kTable2>;
    case CodeKind::kDense16:
      return &LookUpTilesKernel<CodeKind::kDense16>;
    default:
      return &LookUpTilesKernel<CodeKind::kInt8>;
  }
}

cudaError_t StartTiles(const PreparedTiles& weights, const LookUpWeightsArguments& args,
                       cudaStream_t stream) {
  return LaunchInChain(TilesKernelOf(weights.kind()), GridOf(args, kLookUpThreads / 32 * kTileK),
                       kLookUpThreads, 0, stream, weights.Tiles(0), args);
}

bool HasPairs(const RowsView& out) {
  const uintptr_t bytes = out.type == Element::kF32 ? 8 : 4;
  return reinterpret_cast<uintptr_t>(out.data) % bytes == 0 && out.stride % 2 == 0 &&
         out.inner_stride % 2 == 0;
}

}  // namespace

Status Run(const LookUpWeightRowsCall& call, const CallContext& context) {
  const auto& weights = static_cast<const PreparedTiles&>(call.table);
  const RowsView out = RowsOf(call.out);
  const LookUpWeightsArguments args = {IndicesOf(call.ids), out,           call.out.dim(1),
                                       call.table.spec.n,   HasPairs(out), context.errors};
  const auto start = [&](const auto& reader) {
    return context.Check(Start(reader, args, context.stream), "lookup");
  };
  if (weights.traits.marlin_w4) {
    const MarlinW4View view = weights.MarlinW4(0);
    return start(MarlinW4Reader{view, view.codes});
  }
  if (!weights.traits.tiled) return start(CanonicalReader{weights.Canonical(0)});
  if (weights.traits.sparse) return start(SparseTileReader{weights.Tiles(0), weights.kind()});
  return context.Check(StartTiles(weights, args, context.stream), "lookup");
}

}  // namespace marlin::cuda
