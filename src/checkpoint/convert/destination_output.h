// The output of quantizing for a destination: its name, and where the quantized directory lies
// until the output is written.
#pragma once

#include <string>
#include <utility>

#include "checkpoint/files/io.h"
#include "marlin/destination.h"
#include "marlin/status.h"

namespace marlin {

/// Errors: kInvalidArgument for an output whose name is not the destination's file name, or that
/// exists and is not to be replaced; kIo.
Status CheckDestinationOutput(const Destination& destination, const std::string& output,
                              bool overwrite);

/// The folder next to an output that holds the quantized directory until the output is written.
/// What a killed process leaves of it, the next one resumes or replaces.
class IntermediateFolder {
 public:
  /// Errors: kIo, also if another process writes the same output.
  static Result<IntermediateFolder> Make(const std::string& output);
  IntermediateFolder(IntermediateFolder&&) noexcept = default;
  IntermediateFolder& operator=(IntermediateFolder&&) = delete;
  ~IntermediateFolder() { Remove(); }
  std::string quantized() const;
  void Remove();

 private:
  IntermediateFolder(std::string path, FileHandle lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  FileHandle lock_;  ///< Held, so that two processes cannot mix up their recipes.
};

}  // namespace marlin
