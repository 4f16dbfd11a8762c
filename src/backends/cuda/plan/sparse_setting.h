// Which 2:4 weights a device keeps in sparse tiles (docs/decisions/0030-sparse-by-default.md).
#pragma once

#include <optional>

#include "base/environment.h"
#include "plan/gemm/backend.h"

namespace marlin::cuda {

/// Whether weights of a format stay sparse; the others are expanded. `setting` is
/// METAL_MARLIN_CUDA_SPARSE: 0 expands all, another value keeps all that have sparse tiles. Without
/// it the layers of models are expanded, because the persistent kernel reads no sparse tiles.
bool KeepsSparseTiles(Format format, PreparedFor use,
                      const std::optional<EnvironmentVariable>& setting);

}  // namespace marlin::cuda
