// Prepare for the model loader: concatenated columns, read in place, weights from a prepared file,
// and sizes.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "layout/join_columns.h"
#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/weights.h"
#include "plan/gemm/backend.h"

namespace marlin {

/// Prepares concatenated columns as one matrix, with no copy in between if the device can. Codes of
/// unquantized formats may be transposed (join_columns.h). The columns may be freed at once, but
/// the result must not be used before FinishPreparing: many matrices wait for the device once.
/// Precondition: the columns can be joined; everything but the values of unquantized formats has
/// been validated. Errors: kNonFiniteInput for such a value that is NaN or Inf, kUnsupported,
/// kOutOfMemory.
Result<PreparedWeights> PrepareColumns(std::span<const WeightColumns> columns,
                                       const Device& device);

/// Waits until all weights from PrepareColumns are in place. Errors: kDeviceLost.
Status FinishPreparing(const Device& device);

/// About the bytes of weights of this spec that are prepared for a device: those stored, or of
/// dense weights where the device expands 2:4 ones.
int64_t PreparedBytes(const WeightsSpec& spec, const Device& device);

/// The layout of a device's images (plan/gemm/backend.h). Errors: kUnsupported if it has none.
Result<std::string> ImageLayout(const Device& device);
/// The image of prepared weights; it keeps them alive. Precondition: weights of this device.
Result<PreparedImage> ImageOf(const PreparedWeights& weights, const Device& device);
/// Prepared weights backed by an image. Errors: kMalformedFile for data of the wrong size.
Result<PreparedWeights> FromImage(const PreparedImage& image, const Device& device);

}  // namespace marlin
