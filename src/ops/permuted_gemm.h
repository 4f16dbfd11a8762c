// Products with weights that have a permutation along k.
#pragma once

#include <cstdint>
#include <memory>

#include "marlin/status.h"
#include "plan/backend.h"

namespace marlin {

/// Stores the permutation of weights in device memory, beside their prepared matrix. `permutation`
/// is host memory, i32 [experts, k]. Errors: kOutOfMemory, kDeviceLost.
Status AttachPermutation(const Backend& backend, const TensorView& permutation,
                         const PreparedWeights::Storage& weights);

/// The permutation of one matrix, [k], in device memory. Precondition: the weights have one.
inline const int32_t* PermutationOf(const PreparedWeights::Storage& weights, int64_t expert) {
  return weights.permutation.get() + expert * weights.spec.k;
}

/// A plan that gathers the columns of activations in the order of the weights' rows, into its
/// workspace, and runs `planned` on them. Backend and weights outlive it.
std::shared_ptr<const PlannedGemm> GatherFirst(const Backend& backend, const GemmDesc& desc,
                                               std::shared_ptr<const PlannedGemm> planned);

}  // namespace marlin
