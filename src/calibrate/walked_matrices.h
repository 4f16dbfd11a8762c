// The matrices that a walk over a model's layers reaches, and the others of a plan.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/convert/quantize_plan.h"
#include "marlin/checkpoint.h"
#include "model/layers.h"

namespace marlin {

/// By tensor name, the layer that the matrix belongs to; the head follows the last layer.
using WalkedMatrices = std::map<std::string, int64_t>;
WalkedMatrices FindWalkedMatrices(const LayerSource& source, const Dimensions& shape);

/// Lists the other matrices that a plan quantizes, with the method that they get and the reason.
/// Units with such matrices lose their Hadamard blocks: with rounding alone, rotated matrices lose
/// more than others.
std::vector<SkippedTensor> TakeUnwalked(const Checkpoint::Impl& source, const Dimensions& shape,
                                        const WalkedMatrices& walked, QuantizePlan* plan);

}  // namespace marlin
