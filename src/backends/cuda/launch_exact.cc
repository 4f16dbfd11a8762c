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
cudaError_t Launch(const View& weights, const void* function, const ExactProduct& product,
                   cudaStream_t stream) {
  ExactArguments<View> args;
  args.weights = weights;
  args.a = product.a;
  args.epilogue = product.epilogue;
  args.split = PlanExactParts(weights.k);
  const int rows = ExactRowsFor(product.a.m);
  const int outputs = product.epilogue.gated ? weights.n / 2 : weights.n;
  const int row_blocks = (product.a.m + rows - 1) / rows;
  const int strips = (outputs + kStripOutputs - 1) / kStripOutputs;
  const int warps = ExactWarpsFor(int64_t{row_blocks} * strips, args.split.parts);
  // The same for every launch: the attribute is the function's, and other threads launch it too.
  const cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           ExactSharedBytes(rows, kMaxExactParts, kMaxExactParts));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(row_blocks), static_cast<unsigned>(strips));
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
  const void* function = ExactFunctionOf(kind, true, ExactRowsFor(product.a.m));
  return Launch(weights, function, product, stream);
}

cudaError_t LaunchExactCanonical(const CanonicalView& weights, CodeKind kind,
                                 const ExactProduct& product, cudaStream_t stream) {
  const void* function = ExactFunctionOf(kind, false, ExactRowsFor(product.a.m));
  return Launch(weights, function, product, stream);
}

}  // namespace marlin::cuda
