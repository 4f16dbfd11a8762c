// A model's architecture from the headers of its checkpoint, for when config.json is not enough.
#pragma once

#include <string>

#include "marlin/checkpoint.h"
#include "marlin/status.h"
#include "recipe/architecture.h"

namespace marlin::cli {

/// Describes a plain checkpoint from the names and shapes of its tensors. Layers are found by
/// "layers.N." or "h.N."; the number of experts per token comes from config.json.
/// `kv_cache_elements` stays 0: tensor names do not determine it. Errors: kUnsupported for tensors
/// that are not floating-point or for a quantized checkpoint, kMalformedFile for experts without a
/// count per token.
Result<ModelArchitecture> DescribeCheckpoint(const Checkpoint& checkpoint);

/// Describes a config.json, a directory, or a .safetensors file. Falls back to the headers of a
/// checkpoint without a config.json or with an unknown architecture. Errors: as DescribeModel
/// and DescribeCheckpoint, kIo.
Result<ModelArchitecture> DescribeSource(const std::string& source);

}  // namespace marlin::cli
