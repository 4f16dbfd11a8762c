// Describes a loaded decoder as the list of fused operations offered to a backend.
#pragma once

#include "engine/kv_cache.h"
#include "model/layers.h"
#include "model/projection.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// A layer whose mixer is to be described.
struct DescribedLayer {
  const Decoder& decoder;
  const PagePool& pool;
  const ProductOptions& products;
  int64_t index;

  const DecoderLayer& layer() const { return decoder.layers[static_cast<size_t>(index)]; }
};

StepLinear DescribeLinear(const Projection& projection);
StepNorm DescribeNorm(const DeviceVector& weight, float epsilon);
/// A norm of hidden states.
StepNorm DescribeHiddenNorm(const DecoderConfig& config, const DeviceVector& weight);
/// The norm before a layer's mixer.
StepNorm DescribeHiddenNorm(const DescribedLayer& layer);

/// Describes a step. The decoder and the pool must outlive the description.
StepDescription DescribeStep(const Decoder& decoder, const PagePool& pool,
                             const ProductOptions& products);

}  // namespace marlin
