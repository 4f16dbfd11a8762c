// A directory that appears under its name whole or not at all.
//
// Everything is written into the sibling ".<name>.partial-<fingerprint>", which is renamed at the
// end; a killed process leaves at most that hidden directory, which the next run for the same
// target resumes or removes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io.h"
#include "marlin/status.h"

namespace marlin {

class OutputDirectory {
 public:
  struct Options {
    bool overwrite = false;  ///< An existing checkpoint under the name is replaced at the end.
    bool resume = false;     ///< What an interrupted run left is kept for the caller to check.
  };

  /// Prepares the partial directory. `fingerprint` is 16 hexadecimal digits that stand for all
  /// inputs of the run. Errors: kInvalidArgument for a target that exists or is no place for a
  /// directory; kIo, also when another process writes the same target.
  static Result<OutputDirectory> Begin(Io& io, const std::string& target,
                                       std::string_view fingerprint, const Options& options);

  OutputDirectory(OutputDirectory&& other) noexcept;
  OutputDirectory& operator=(OutputDirectory&&) = delete;
  /// Removes the partial directory unless it was committed or kept.
  ~OutputDirectory();

  /// Where to write.
  const std::string& path() const { return partial_; }

  /// Writes a whole small file.
  Status WriteFile(const std::string& name, std::string_view content);

  /// Removes what an earlier run left beside the files of this one.
  Status RemoveAllExcept(const std::vector<std::string>& names);

  /// Leaves the partial directory for a later run to resume.
  void Keep() { keep_ = true; }

  /// Flushes the directory, gives it its name and removes what it replaced.
  Status Commit();

 private:
  explicit OutputDirectory(Io& io) : io_(&io) {}
  Status RemoveStale(std::string_view fingerprint) const;

  Io* io_;
  std::string parent_;
  std::string name_;
  std::string target_;
  std::string partial_;
  FileHandle lock_;
  bool replaces_ = false;
  bool owned_ = false;  // The partial directory is this run's to remove.
  bool keep_ = false;
};

}  // namespace marlin
