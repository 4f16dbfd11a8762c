// A model as the headers of its checkpoint show it, where config.json alone does not say enough.
#pragma once

#include <string>

#include "marlin/checkpoint.h"
#include "marlin/status.h"
#include "recipe/architecture.h"

namespace marlin::cli {

/// Describes a plain checkpoint from the names and shapes of its tensors. Layers are told by
/// "layers.N." or "h.N."; the experts of a token come from config.json. `kv_cache_elements` stays
/// 0: names do not tell. Errors: kUnsupported for tensors that are not floating-point or for a
/// quantized checkpoint, kMalformedFile for experts without a count per token.
Result<ModelArchitecture> DescribeCheckpoint(const Checkpoint& checkpoint);

/// The same of a config.json, a directory, or a .safetensors file. The headers of a checkpoint
/// answer where there is no config.json or its architecture is not known. Errors: those of
/// DescribeModel and DescribeCheckpoint, kIo.
Result<ModelArchitecture> DescribeSource(const std::string& source);

}  // namespace marlin::cli
