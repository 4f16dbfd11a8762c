// Describes a loaded decoder as the list of fused operations offered to a backend.
#pragma once

#include "engine/kv_cache.h"
#include "model/layers.h"
#include "model/projection.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// Describes a step. The decoder and the pool must outlive the description.
StepDescription DescribeStep(const Decoder& decoder, const PagePool& pool,
                             const ProductOptions& products);

}  // namespace marlin
