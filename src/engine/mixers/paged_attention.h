// Common parts of mixers that attend to paged keys and values.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/describe_step.h"
#include "engine/forward.h"
#include "marlin/decoder.h"
#include "marlin/tensor.h"
#include "plan/step/decoder_calls.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// The heads [first, first + heads * dim) of f32 rows, as [rows, heads, dim].
MutableTensorView HeadsIn(const MutableTensorView& rows, int64_t first, int64_t heads, int64_t dim);

/// MixedOf as [rows, heads, dim].
MutableTensorView MixedHeads(const Pass& pass, int64_t layer, int64_t heads, int64_t dim);

/// Empty: the layer does not rotate.
RotaryEmbedding RotaryOf(const Decoder& decoder, int64_t layer);

SequenceRows RowsOf(const Pass& pass, int64_t layer);
PagedCache CacheOf(const Pass& pass, int64_t layer);
/// Options without sinks.
AttentionOptions AttentionOptionsOf(const Pass& pass, int64_t layer);

/// The device operations of attention with a paged cache, whatever its mixer: a device has all of
/// them, or runs no attention.
std::vector<DecoderOperation> PagedAttentionOperations();

/// Runs paged attention.
Status Attend(const Pass& pass, const PagedAttentionCall& call);

/// The parts of a layer's AttentionStep that its KV cache and the config determine.
AttentionStep DescribeAttention(const DescribedLayer& layer);

}  // namespace marlin
