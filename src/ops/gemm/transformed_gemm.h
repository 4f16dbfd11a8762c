// Products with weights that have an input transform: a permutation along k, input scales, Hadamard
// blocks.
#pragma once

#include <cstdint>
#include <memory>

#include "marlin/status.h"
#include "plan/gemm/backend.h"
#include "plan/gemm/transform_columns.h"

namespace marlin {

/// The arrays of an input transform in host memory, [experts, k] each; empty where there is none.
struct InputArrays {
  TensorView permutation;  ///< i32
  TensorView scale;        ///< f32
};

/// Stores the transform of weights in device memory, with their prepared matrix. Errors:
/// kOutOfMemory, kDeviceLost.
Status AttachInput(const Backend& backend, const InputArrays& arrays,
                   const PreparedWeights::Storage& weights);

/// The transform of one matrix.
InputTransform InputOf(const PreparedWeights::Storage& weights, int64_t expert);

/// A plan that transforms the columns of activations into its workspace and runs `planned` on them.
/// Backend and weights outlive it.
std::shared_ptr<const PlannedGemm> TransformFirst(const Backend& backend, const GemmDesc& desc,
                                                  std::shared_ptr<const PlannedGemm> planned);

}  // namespace marlin
