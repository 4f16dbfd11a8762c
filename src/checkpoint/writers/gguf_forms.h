// Parts of a model's configuration without a form in GGUF, and its RoPE there.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/writers/gguf_metadata.h"
#include "marlin/status.h"
#include "recipe/decoder_shape.h"
#include "recipe/typed_config.h"

namespace marlin {

/// The largest numbers of a configuration that are described.
inline constexpr int64_t kMostGgufCount = INT32_MAX;
inline constexpr double kMostGgufReal = 1e30;

/// Reports to typed.config the values that programs which read these files take for granted to be
/// others.
void CheckGgufForm(TypedConfig& typed, const Dimensions& dimensions, const GgufNaming& naming);

/// Whether each layer has a sliding window, in types that have sliding_window_pattern; empty: in
/// others.
std::vector<bool> GgufWindowedLayers(ModelConfig& config, const Dimensions& dimensions);

/// Adds what describes RoPE, and the tensors of its factors to the facts. Errors: kUnsupported for
/// layers with a RoPE of their own; from ReadRopeParameters. Others are reported to typed.config.
Status DescribeGgufRotary(TypedConfig& typed, GgufModelFacts* facts, GgufMetadataBuilder* metadata);

}  // namespace marlin
