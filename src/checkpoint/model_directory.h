// Which files belong to a model's directory.
#pragma once

#include <string>

#include "checkpoint/io.h"
#include "marlin/status.h"

namespace marlin {

/// Says whether an entry of a model's directory may be read or copied. A link may lead to a file of
/// the same directory, and from ".../models--ORG--NAME/snapshots/REV" into
/// ".../models--ORG--NAME/blobs", as the cache of Hugging Face has it. A missing entry is no error.
/// Errors, with the link and where it leads: kUnsupported outside of these, kIo to nothing.
Status CheckModelFile(Io& io, const std::string& directory, const std::string& name);

}  // namespace marlin
