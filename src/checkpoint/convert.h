// The conversions of marlin/checkpoint.h with a given Io.
#pragma once

#include <string>

#include "checkpoint/io.h"
#include "marlin/checkpoint.h"

namespace marlin {

class MatrixQuantizer;

/// `quantizer`, unless null, is asked for every matrix first.
Result<QuantizeCheckpointReport> QuantizeCheckpointOn(Io& io, const std::string& source,
                                                      const std::string& output,
                                                      const QuantizeCheckpointOptions& options,
                                                      MatrixQuantizer* quantizer = nullptr);

Result<ImportCheckpointReport> ImportCheckpointOn(Io& io, const std::string& source,
                                                  const std::string& output,
                                                  const ImportCheckpointOptions& options);

/// shard_bytes: most data bytes per file, unless one tensor is larger.
Status DequantizeCheckpointOn(Io& io, const std::string& source, const std::string& output,
                              DType dtype, bool overwrite, int64_t shard_bytes,
                              const Progress& progress, const CheckpointOptions& options = {});

Result<ConvertCheckpointReport> ConvertCheckpointOn(Io& io, const std::string& source,
                                                    const std::string& output,
                                                    const ConvertCheckpointOptions& options);

}  // namespace marlin
