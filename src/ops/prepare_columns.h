// Prepare for the loader of models: columns side by side, straight from where they lie; and weights
// that were prepared before.
#pragma once

#include <span>
#include <string>

#include "layout/join_columns.h"
#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/weights.h"
#include "plan/backend.h"

namespace marlin {

/// Weights side by side as one matrix on a device, in one copy where the device can. Codes of
/// unquantized formats may lie transposed (join_columns.h). Precondition: the columns can be
/// joined; all but the values of unquantized formats is validated. Errors: kNonFiniteInput for such
/// a value that is NaN or Inf, kUnsupported, kOutOfMemory.
Result<PreparedWeights> PrepareColumns(std::span<const WeightColumns> columns,
                                       const Device& device);

/// The layout of a device's images (plan/backend.h). Errors: kUnsupported where it has none.
Result<std::string> ImageLayout(const Device& device);
/// The bytes of prepared weights, which the image keeps. Precondition: weights of this device.
Result<PreparedImage> ImageOf(const PreparedWeights& weights, const Device& device);
/// Prepared weights that lie in an image. Errors: kMalformedFile for data of another size.
Result<PreparedWeights> FromImage(const PreparedImage& image, const Device& device);

}  // namespace marlin
