// Weights of the same values in forms that kernels and other programs' formats know.
#pragma once

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// The format of 8 bits that holds every value of one of 5 or 6 bits; the format itself otherwise.
Format WiderFormat(Format format);

/// The spec of weights with one level of scales: fp32, unless they have only one already.
WeightsSpec FlatSpec(WeightsSpec spec);

/// The spec of dense weights with one level of scales, which other programs' formats have.
WeightsSpec PlainSpec(WeightsSpec spec);

/// Weights with one level of scales, fp32: super scale * scale, rounded once. Weights that have
/// only one are returned as they are. Errors: as Validate, kOutOfMemory.
Result<QuantizedWeights> FlattenScales(const QuantizedWeights& weights);

/// Weights with codes of 8 bits in place of 5 or 6 (WiderFormat); others are returned as they are.
/// Errors: as Validate, kOutOfMemory.
Result<QuantizedWeights> WidenCodes(const QuantizedWeights& weights);

/// Weights in the plainer form that `spec` asks for, by Expand24, WidenCodes and FlattenScales.
/// Precondition: `spec` is the weights' own, or one that these lead to. Errors: as these.
Result<QuantizedWeights> ConvertTo(const WeightsSpec& spec, const QuantizedWeights& weights);

}  // namespace marlin
