// A directory that appears under its name whole or not at all.
//
// Everything is written into the sibling ".<name>.partial-<fingerprint>", which is renamed at the
// end; a killed process leaves at most that hidden directory, which the next run for the same
// target resumes or removes.
//
// Several writers of one target: a directory under a hidden or the target's name is emptied,
// renamed or removed only by the process that holds its lock and has found it under that name
// after locking. A lock belongs to the directory itself, so it stays valid through a rename, and a
// killed process loses it. Whoever does not get a lock touches nothing.
#pragma once

#include <map>
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
    /// Files that are never removed, with the paths that messages call them.
    std::map<FileIdentity, std::string> source;
  };

  /// Prepares the partial directory. `fingerprint` is 16 hexadecimal digits that stand for all
  /// inputs of the run. Errors: kInvalidArgument for a target that exists, is no place for a
  /// directory or holds a file of the source; kIo, also when another process writes the same
  /// target.
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

  /// Says that a file of this name was written beside those of WriteFile.
  void AddWritten(const std::string& name, const FileInfo& file) { written_[name] = file; }

  /// Removes what an earlier run left, except for regular files of these names.
  Status RemoveAllExcept(const std::vector<std::string>& names);

  /// Leaves the partial directory for a later run to resume.
  void Keep() { keep_ = true; }

  /// Flushes the directory, gives it its name and removes what it replaced. Errors: kIo, also when
  /// it no longer holds exactly what was written.
  Status Commit();

 private:
  OutputDirectory(Io& io, const Options& options) : io_(&io), options_(options) {}
  Status SetNames(const std::string& target, std::string_view fingerprint);
  Status Prepare();
  void GiveUp();
  Status RestoreSwapped() const;
  Status CheckTarget() const;
  Status CheckReplaceable(const FileInfo& info) const;
  Status LockPartial();
  Status RemoveStale() const;
  Status CheckWritten() const;
  Status Replace();
  Result<std::string> FindSource(const std::string& path) const;
  Result<bool> IsLocked(const std::string& path) const;

  Io* io_;
  Options options_;
  std::string parent_;
  std::string name_;
  std::string target_;
  std::string partial_;
  FileHandle lock_;  // Open while the directory under partial_ is this run's to change.
  std::map<std::string, FileInfo> written_;
  bool made_ = false;  // The partial directory may exist only because this run made it.
  bool keep_ = false;
};

}  // namespace marlin
