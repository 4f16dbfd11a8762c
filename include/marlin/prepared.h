// Files of prepared weights, which a later Model::Open memory-maps instead of preparing again.
#pragma once

#include <cstdint>
#include <string>

#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The result of PrepareModel.
struct PrepareModelReport {
  std::string output;
  std::string layout;  ///< Weight layout and its version: "cpu_panels/1" on every CPU.
  int64_t bytes = 0;   ///< The file's size.
  double seconds = 0;
};

/// Options of PrepareModel.
struct PrepareModelOptions {
  bool overwrite = false;  ///< Replace an existing file, if PrepareModel wrote it.
  Progress progress = {};  ///< Called with (done, total) layers.
};

/// Prepares the weights of a model directory for a device, one after the other, and writes them
/// atomically to a file, which ModelOptions::prepared names when the model is opened. Everything
/// but the weights is still read from the directory, which must be unchanged. Errors: as
/// Model::Open; kUnsupported for a device whose weights cannot be written; kInvalidArgument for an
/// existing output; kIo.
Result<PrepareModelReport> PrepareModel(const std::string& path, const Device& device,
                                        const std::string& output,
                                        const PrepareModelOptions& options = {});

/// Verifies the checksums of all weights in a file of prepared weights; Model::Open does not.
/// Errors: kIo, kUnsupported for another version, kMalformedFile naming the projection that
/// differs.
Status VerifyPreparedModel(const std::string& file);

/// True for a regular file that begins with the magic number of prepared weights.
bool IsPreparedModel(const std::string& file);

}  // namespace marlin
#pragma GCC visibility pop
