// The rule for which files belong to a model's directory.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/files/io.h"
#include "marlin/status.h"

namespace marlin {

/// Most bytes of a small file of a model: tokenizer, licence, ...
inline constexpr int64_t kMaxSideFileBytes = int64_t{256} << 20;

/// Checks whether an entry of a model's directory may be read or copied. A link may point to a file
/// of the same directory, and to one of ".../models--ORG--NAME/blobs" or ".../snapshots", as models
/// lie in the Hugging Face cache. A missing entry is no error.
/// Errors, with the link and its target: kUnsupported for other targets, kIo for a dangling link.
Status CheckModelFile(Io& io, const std::string& directory, const std::string& name);

}  // namespace marlin
