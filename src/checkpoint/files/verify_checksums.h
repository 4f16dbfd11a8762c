// Checkpoint::VerifyChecksums, whose progress can be watched.
#pragma once

#include "marlin/checkpoint.h"
#include "marlin/status.h"

namespace marlin {

/// Checkpoint::VerifyChecksums; `progress` counts bytes.
Status VerifyChecksums(const Checkpoint& checkpoint, const Progress& progress);

}  // namespace marlin
