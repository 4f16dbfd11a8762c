#include "checkpoint/convert/destination_output.h"

#include <fmt/core.h>

#include <filesystem>
#include <system_error>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/files/output_directory.h"

namespace marlin {

Status CheckDestinationOutput(const Destination& destination, const std::string& output,
                              bool overwrite) {
  if (!output.ends_with(destination.suffix)) {
    return Invalid(fmt::format("{}: {} loads one file, whose name must end in {}",
                               Printable(output), destination.name, destination.suffix));
  }
  SystemIo io;
  OutputDirectory::Options options;
  options.overwrite = overwrite;
  if (!destination.suffix.empty()) {
    options.file = std::filesystem::path(output).filename().string();
  }
  return OutputDirectory::Check(io, output, options);
}

Result<IntermediateFolder> IntermediateFolder::Make(const std::string& output) {
  std::filesystem::path path(output);
  if (!path.has_filename()) path = path.parent_path();  // It ended in a slash.
  const std::string folder =
      (path.parent_path() / ("." + path.filename().string() + ".quantized")).string();
  SystemIo io;
  MARLIN_RETURN_IF_ERROR(io.MakeDirectory(folder));
  MARLIN_ASSIGN_OR_RETURN(FileHandle lock, io.LockDirectory(folder));
  if (!lock.open()) {
    return Status(Code::kIo, fmt::format("{}: another process is writing it", Printable(output)));
  }
  return IntermediateFolder(folder, std::move(lock));
}

void IntermediateFolder::Remove() {
  std::error_code ignored;
  if (lock_.open()) std::filesystem::remove_all(path_, ignored);
  lock_ = FileHandle();
}

std::string IntermediateFolder::quantized() const { return path_ + "/model"; }

}  // namespace marlin
