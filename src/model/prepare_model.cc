#include <fmt/core.h>

#include <chrono>
#include <new>

#include "base/macros.h"
#include "base/path_check.h"
#include "base/printable.h"
#include "base/seconds_since.h"
#include "marlin/prepared.h"
#include "model/layers.h"
#include "model/open_model.h"
#include "model/placement.h"
#include "model/prepared_file.h"
#include "ops/gemm/prepare_columns.h"

namespace marlin {
namespace {

Result<PrepareModelReport> PrepareImpl(const std::string& path, const Device& device,
                                       const std::string& output,
                                       const PrepareModelOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  MARLIN_RETURN_IF_ERROR(CheckPath(output));
  PrepareModelReport report;
  report.output = output;
  MARLIN_ASSIGN_OR_RETURN(ModelDirectory directory, OpenModelDirectory(path));
  MARLIN_ASSIGN_OR_RETURN(const Device chosen,
                          DeviceFor(device, directory.config, {.prepared = true}));
  MARLIN_ASSIGN_OR_RETURN(report.layout, ImageLayout(chosen));
  SystemIo io;
  MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<PreparedFileWriter> writer,
                          PreparedFileWriter::Begin(io, output, options.overwrite));
  LoadOptions load;
  load.write = writer.get();
  load.progress = options.progress;
  MARLIN_RETURN_IF_ERROR(
      LoadDecoder(directory.checkpoint, std::move(directory.config), chosen, load).status());
  MARLIN_RETURN_IF_ERROR(writer->Finish(report.layout, PreparedSource(directory.checkpoint)));
  report.bytes = writer->bytes();
  report.seconds = SecondsSince(start);
  return report;
}

}  // namespace

Result<PrepareModelReport> PrepareModel(const std::string& path, const Device& device,
                                        const std::string& output,
                                        const PrepareModelOptions& options) {
  try {
    return PrepareImpl(path, device, output, options);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(path) + ": no memory to prepare it");
  }
}

Status VerifyPreparedModel(const std::string& file) {
  SystemIo io;
  try {
    MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<const PreparedFile> prepared,
                            PreparedFile::Open(io, file));
    return prepared->VerifyChecksums();
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(file) + ": no memory to verify it");
  }
}

bool IsPreparedModel(const std::string& file) {
  SystemIo io;
  return IsPreparedFile(io, file);
}

}  // namespace marlin
