// Entry points of the experts' kernels for cudaLaunchKernelExC, one for each kind of codes.
#pragma once

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// The GEMV kernel; its parameters: ExpertGemvArguments. `octets`: n8 tiles of rows, 1 or 2.
template <CodeKind kKind>
const void* ExpertGemvFunction(bool bf16, ParameterUse use, int octets);
/// The WGMMA kernel; its parameters: ExpertMaps (a CUtensorMap for every width),
/// ExpertWgmmaArguments.
template <CodeKind kKind>
const void* ExpertWgmmaFunction(bool bf16, ParameterUse use);
/// The exact kernel; its parameters: ExpertExactArguments of TileView, or else of CanonicalView.
template <CodeKind kKind>
const void* ExpertExactFunction(bool tiled);

#define MARLIN_KIND(kind)                                                                  \
  template <>                                                                              \
  const void* ExpertGemvFunction<CodeKind::kind>(bool bf16, ParameterUse use, int octets); \
  template <>                                                                              \
  const void* ExpertWgmmaFunction<CodeKind::kind>(bool bf16, ParameterUse use);            \
  template <>                                                                              \
  const void* ExpertExactFunction<CodeKind::kind>(bool tiled);
#include "backends/cuda/layout/code_kinds.def"
#undef MARLIN_KIND

/// The same for sparse tiles (layout/sparse_layout.h); `use` is not kAll. The exact kernel's
/// parameters: ExpertExactArguments of SparseTileView.
template <CodeKind kKind>
const void* SparseExpertGemvFunction(bool bf16, ParameterUse use, int octets);
template <CodeKind kKind>
const void* SparseExpertWgmmaFunction(bool bf16, ParameterUse use);
template <CodeKind kKind>
const void* SparseExpertExactFunction();

#define MARLIN_KIND(kind)                                                                        \
  template <>                                                                                    \
  const void* SparseExpertGemvFunction<CodeKind::kind>(bool bf16, ParameterUse use, int octets); \
  template <>                                                                                    \
  const void* SparseExpertWgmmaFunction<CodeKind::kind>(bool bf16, ParameterUse use);            \
  template <>                                                                                    \
  const void* SparseExpertExactFunction<CodeKind::kind>();
#include "backends/cuda/layout/sparse_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
