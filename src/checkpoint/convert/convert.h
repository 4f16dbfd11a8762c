// The conversions of marlin/checkpoint.h with a given Io.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "checkpoint/files/io.h"
#include "marlin/checkpoint.h"

namespace marlin {

class MatrixQuantizer;
struct ModuleRecord;

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

/// Whether a target of ConvertCheckpoint holds a module, judged by its record alone: not by its
/// numbers. Errors: kUnsupported saying what it cannot hold.
Status CheckModule(const Checkpoint& source, std::string_view target, const ModuleRecord& record);
/// Whether it holds a model with such modules, all of which CheckModule accepts, and the
/// config.json of a source. Errors: kUnsupported naming the key, or the modules that do not go
/// together.
Status CheckConversion(const Checkpoint& source, std::string_view target,
                       std::span<const ModuleRecord> records);

Result<ConvertCheckpointReport> ConvertCheckpointOn(Io& io, const std::string& source,
                                                    const std::string& output,
                                                    const ConvertCheckpointOptions& options);

}  // namespace marlin
