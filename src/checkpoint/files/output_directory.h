// Writes a directory that appears under its name complete or not at all.
//
// Everything is written to the sibling ".<name>.partial-<fingerprint>", which is renamed at the
// end; a killed process leaves at most that hidden directory, which the next run for the same
// target resumes or removes.
//
// Several writers of one target: a process empties, renames or removes a directory under a hidden
// or the target's name only while it holds the directory's lock and has found it under that name
// after locking. A lock belongs to the directory itself, so it stays valid through a rename, and
// the system releases it when a process is killed. A process without the lock changes nothing.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/io.h"
#include "marlin/status.h"

namespace marlin {

class OutputDirectory {
 public:
  struct Options {
    bool overwrite = false;  ///< Replaces an existing checkpoint of that name at the end.
    /// Not empty: the target is this file of the directory, which is renamed, not the directory.
    std::string file;
    bool resume = false;  ///< Keeps the files of an interrupted run for the caller to check.
    /// Files that must never be removed, with their paths for messages.
    std::map<FileIdentity, std::string> source;
  };

  /// Prepares the partial directory. `fingerprint` is 16 hexadecimal digits that identify all
  /// inputs of the run. Errors: kInvalidArgument for a target that exists, cannot be a directory or
  /// holds a file of the source; kIo, also when another process writes the same target.
  static Result<OutputDirectory> Begin(Io& io, const std::string& target,
                                       std::string_view fingerprint, const Options& options);

  /// Whether Begin would accept a target, apart from the source; writes nothing. Errors: from
  /// Begin.
  static Status Check(Io& io, const std::string& target, const Options& options);

  OutputDirectory(OutputDirectory&& other) noexcept;
  OutputDirectory& operator=(OutputDirectory&&) = delete;
  /// Removes the partial directory unless it was committed or kept.
  ~OutputDirectory();

  /// The directory to write to.
  const std::string& path() const { return partial_; }

  /// Writes a whole small file.
  Status WriteFile(const std::string& name, std::string_view content);

  /// Records that a file of this name was written other than through WriteFile.
  void AddWritten(const std::string& name, const FileInfo& file) { written_[name] = file; }

  /// Removes the files of an earlier run, except for regular files of these names.
  Status RemoveAllExcept(const std::vector<std::string>& names);

  /// Leaves the partial directory in place for a later run to resume.
  void Keep() { keep_ = true; }

  /// Flushes the directory, renames it to the target and removes the replaced one. Errors: kIo,
  /// also when it no longer holds exactly the files that were written.
  Status Commit();

 private:
  OutputDirectory(Io& io, const Options& options) : io_(&io), options_(options) {}
  Status SetNames(const std::string& target, std::string_view fingerprint);
  Status Prepare();
  void GiveUp();
  Status RestoreSwapped() const;
  Status CheckTarget() const;
  Status LockPartial();
  Status RemoveStale() const;
  Status CheckWritten() const;
  Status Replace();
  Status Finish(const char* rest);
  Status CommitFile(bool replace);
  Result<bool> IsLocked(const std::string& path) const;

  Io* io_;
  Options options_;
  std::string parent_;
  std::string name_;
  std::string target_;
  std::string partial_;
  FileHandle lock_;  // Held while this run may change the directory at partial_.
  std::map<std::string, FileInfo> written_;
  bool made_ = false;  // The partial directory may exist only because of this run.
  bool keep_ = false;
};

}  // namespace marlin
