// The ways in which a tile kernel can cut a problem: what `name@variant`, tuning tables and
// `bench --kernel all` choose from.
#pragma once

#include <vector>

#include "backends/cuda/tile_problem.h"
#include "plan/gemm_desc.h"
#include "plan/kernel_desc.h"

namespace marlin::cuda {

/// What of a problem decides how it can be cut.
TileProblem ProblemOf(const GemmDesc& desc);

/// As Backend::Variants: first the one that the kernel takes itself. Precondition: m, n, k > 0 for
/// any but an empty list.
std::vector<KernelVariant> VariantsOf(const KernelDesc& kernel, const GemmDesc& desc,
                                      const DeviceShape& device);

/// As Backend::CanRunAs.
bool CanRunAs(const KernelDesc& kernel, const GemmDesc& desc, const DeviceShape& device,
              const KernelVariant& variant);

}  // namespace marlin::cuda
