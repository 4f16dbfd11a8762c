// Files of weights as a device holds them, so that the next start of a model maps them.
#pragma once

#include <cstdint>
#include <string>

#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Facts about a file that PrepareModel wrote.
struct PrepareModelReport {
  std::string output;
  std::string layout;  ///< The weights' layout: "cpu_panels/1" on every CPU.
  int64_t bytes = 0;   ///< The file's size.
  double seconds = 0;
};

struct PrepareModelOptions {
  bool overwrite = false;  ///< Replaces a file that PrepareModel wrote.
  Progress progress = {};  ///< Called with (done, total) layers.
};

/// Prepares the weights of a model's directory for a device, one after the other, and writes them
/// into a file that appears whole or not at all. ModelOptions::prepared names it when the model is
/// opened: the directory, which must be there unchanged, still gives everything else. Errors: those
/// of Model::Open; kUnsupported for a device whose weights cannot be written; kInvalidArgument for
/// an output that exists; kIo.
Result<PrepareModelReport> PrepareModel(const std::string& path, const Device& device,
                                        const std::string& output,
                                        const PrepareModelOptions& options = {});

/// Compares all weights of such a file with their checksums, which opening a model does not.
/// Errors: kIo, kUnsupported for another version, kMalformedFile naming the projection that
/// differs.
Status VerifyPreparedModel(const std::string& file);

/// True for a regular file that begins as PrepareModel's do.
bool IsPreparedModel(const std::string& file);

}  // namespace marlin
#pragma GCC visibility pop
