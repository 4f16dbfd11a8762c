// The conversions of marlin/checkpoint.h on a given file system.
#pragma once

#include <string>

#include "checkpoint/io.h"
#include "marlin/checkpoint.h"

namespace marlin {

Result<QuantizeCheckpointReport> QuantizeCheckpointOn(Io& io, const std::string& source,
                                                      const std::string& output,
                                                      const QuantizeCheckpointOptions& options);

/// shard_bytes: at most that much data a file, unless one tensor is larger.
Status DequantizeCheckpointOn(Io& io, const std::string& source, const std::string& output,
                              DType dtype, bool overwrite, int64_t shard_bytes,
                              const Progress& progress);

}  // namespace marlin
