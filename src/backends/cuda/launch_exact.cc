#include <cuda_runtime_api.h>

#include "backends/cuda/exact_functions.h"
#include "backends/cuda/exact_layout.h"
#include "backends/cuda/launch.h"

namespace marlin::cuda {
namespace {

const void* ExactFunctionOf(CodeKind kind, bool tiled, int rows) {
  switch (kind) {
#define MARLIN_KIND(name) \
  case CodeKind::name:    \
    return ExactFunction<CodeKind::name>(tiled, rows);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND
  }
  return nullptr;
}

template <typename View>
cudaError_t Launch(const View& weights, CodeKind kind, bool tiled, const ExactProduct& product,
                   cudaStream_t stream) {
  const int outputs = product.epilogue.gated ? weights.n / 2 : weights.n;
  const int rows = ExactRowsFor(product.a.m, outputs);
  const void* function = ExactFunctionOf(kind, tiled, rows);
  ExactArguments<View> args;
  args.weights = weights;
  args.a = product.a;
  args.epilogue = product.epilogue;
  args.split = PlanExactParts(weights.k);
  const int row_blocks = (product.a.m + rows - 1) / rows;
  const int columns = ExactStripsFor(rows) * kStripOutputs;
  const int column_blocks = (outputs + columns - 1) / columns;
  const int warps = ExactWarpsFor(rows, int64_t{row_blocks} * column_blocks, args.split.parts);
  // The same for every launch: the attribute is the function's, and other threads launch it too.
  const cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           ExactSharedBytes(rows, ExactMaxWarps(rows), kMaxExactParts));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(row_blocks), static_cast<unsigned>(column_blocks));
  config.blockDim = dim3(static_cast<unsigned>(warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(ExactSharedBytes(rows, warps, args.split.parts));
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = product.overlap_previous ? 1 : 0;
  void* parameters[] = {&args};
  return cudaLaunchKernelExC(&config, function, parameters);
}

}  // namespace

cudaError_t LaunchExactTiles(const TileView& weights, CodeKind kind, const ExactProduct& product,
                             cudaStream_t stream) {
  return Launch(weights, kind, true, product, stream);
}

cudaError_t LaunchExactCanonical(const CanonicalView& weights, CodeKind kind,
                                 const ExactProduct& product, cudaStream_t stream) {
  return Launch(weights, kind, false, product, stream);
}

}  // namespace marlin::cuda
