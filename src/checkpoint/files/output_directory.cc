#include "checkpoint/files/output_directory.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/macros.h"
#include "checkpoint/files/file_names.h"

namespace marlin {
namespace {

constexpr size_t kFingerprintDigits = 16;
constexpr std::string_view kPartialMark = ".partial-";
constexpr std::string_view kFirstShard = "model-00001-of-";  // GGUF in shards.

std::string PartialPrefix(const std::string& name) {
  return fmt::format(".{}{}", name, kPartialMark);
}

constexpr std::string_view kSwapSuffix = ".swap";  // Io::Exchange's third name.
// How often another process may replace the partial directory before we lock it.
constexpr int kLockAttempts = 16;

// Whether a name belongs to a partial directory: the prefix, a fingerprint, perhaps ".swap".
bool IsPartialName(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  if (name.ends_with(kSwapSuffix)) name.remove_suffix(kSwapSuffix.size());
  return name.size() == kFingerprintDigits &&
         name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Status InvalidTarget(const std::string& target, const std::string& message) {
  return Status(Code::kInvalidArgument, Printable(target) + ": " + message);
}

Status Disturbed(const std::string& path, const std::string& message) {
  return Status(Code::kIo, Printable(path) + ": " + message);
}

// The source's name of a file that removing `path` would destroy, or "" for none.
Result<std::string> FindSource(Io& io, const std::map<FileIdentity, std::string>& source,
                               const std::string& path) {
  MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io.StatLink(path));
  FileIdentity identity = info.identity;
  if (info.kind == FileKind::kLink) {
    // The source may have been opened through this link.
    MARLIN_ASSIGN_OR_RETURN(const FileInfo linked, io.Stat(path));
    identity = linked.identity;
  }
  const auto found = source.find(identity);
  if (info.kind != FileKind::kMissing && found != source.end()) return found->second;
  if (info.kind != FileKind::kDirectory) return std::string();
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io.List(path));
  for (const std::string& name : names) {
    MARLIN_ASSIGN_OR_RETURN(std::string below, FindSource(io, source, JoinPath(path, name)));
    if (!below.empty()) return below;
  }
  return std::string();
}

// Replacing removes the old directory, so it must contain only a checkpoint.
Status CheckReplaceable(Io& io, const std::string& target, const FileInfo& info, bool as_file) {
  if (as_file) {
    return info.kind == FileKind::kRegular
               ? Status()
               : InvalidTarget(target, "exists and is not a file, so it is not replaced");
  }
  if (info.kind != FileKind::kDirectory) {
    return InvalidTarget(target, "exists and is not a directory, so it is not replaced");
  }
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io.List(target));
  bool is_checkpoint = names.empty();
  for (const std::string& name : names) {
    MARLIN_ASSIGN_OR_RETURN(const FileInfo entry, io.StatLink(JoinPath(target, name)));
    if (entry.kind == FileKind::kDirectory) {
      return InvalidTarget(
          target, fmt::format("holds the directory {}, so it is not replaced", Printable(name)));
    }
    is_checkpoint = is_checkpoint || name == kConfigFile || name.ends_with(kSafetensors) ||
                    name.starts_with(kFirstShard);
  }
  if (!is_checkpoint)
    return InvalidTarget(target, "exists and is not a checkpoint, so it is not replaced");
  return {};
}

}  // namespace

OutputDirectory::OutputDirectory(OutputDirectory&& other) noexcept = default;

OutputDirectory::~OutputDirectory() {
  if (keep_ || !lock_.open()) return;
  const Result<bool> locked = IsLocked(partial_);
  // Errors cannot be reported here; the next run removes the remains.
  if (locked.ok() && *locked) (void)io_->RemoveTree(partial_);
}

// Whether a path still names the directory that this run locked.
Result<bool> OutputDirectory::IsLocked(const std::string& path) const {
  MARLIN_ASSIGN_OR_RETURN(const FileInfo locked, io_->StatOpen(lock_));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo named, io_->StatLink(path));
  return named.kind == FileKind::kDirectory && named.identity == locked.identity;
}

Status OutputDirectory::SetNames(const std::string& target, std::string_view fingerprint) {
  target_ = target;
  while (target_.size() > 1 && target_.back() == '/') target_.pop_back();
  const size_t slash = target_.rfind('/');
  name_ = target_.substr(slash == std::string::npos ? 0 : slash + 1);
  parent_ = slash == std::string::npos ? std::string(1, '.')
                                       : target_.substr(0, std::max(slash, size_t{1}));
  if (name_.empty() || name_ == "." || name_ == "..") {
    return InvalidTarget(target, "is not a name for a new directory");
  }
  MARLIN_ASSIGN_OR_RETURN(const FileInfo parent, io_->Stat(parent_));
  if (parent.kind != FileKind::kDirectory) {
    return Status(Code::kIo, fmt::format("{}: no such directory to write {} into",
                                         Printable(parent_), Printable(name_)));
  }
  partial_ = JoinPath(parent_, PartialPrefix(name_) + std::string(fingerprint));
  return {};
}

Status OutputDirectory::CheckTarget() const {
  MARLIN_ASSIGN_OR_RETURN(const FileInfo existing, io_->StatLink(target_));
  if (existing.kind == FileKind::kMissing) return {};
  MARLIN_ASSIGN_OR_RETURN(const std::string lost, FindSource(*io_, options_.source, target_));
  if (!lost.empty()) {
    return InvalidTarget(target_,
                         fmt::format("the output would replace the source, {}", Printable(lost)));
  }
  if (!options_.overwrite) return InvalidTarget(target_, "exists already; --overwrite replaces it");
  return CheckReplaceable(*io_, target_, existing, !options_.file.empty());
}

// Without an atomic swap, a process killed between its renames leaves no target, and the target's
// content under a third name.
Status OutputDirectory::RestoreSwapped() const {
  const std::string prefix = PartialPrefix(name_);
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io_->List(parent_));
  for (const std::string& name : names) {
    if (!IsPartialName(name, prefix) || !name.ends_with(kSwapSuffix)) continue;
    MARLIN_ASSIGN_OR_RETURN(const FileInfo target, io_->StatLink(target_));
    if (target.kind != FileKind::kMissing) return {};
    const std::string path = JoinPath(parent_, name);
    const Result<FileHandle> lock = io_->LockDirectory(path);
    if (!lock.ok() || !lock->open()) continue;  // Another process is between its renames.
    MARLIN_RETURN_IF_ERROR(io_->RenameNew(path, target_));
  }
  return {};
}

Status OutputDirectory::LockPartial() {
  for (int attempt = 0; attempt < kLockAttempts; ++attempt) {
    made_ = true;
    MARLIN_RETURN_IF_ERROR(io_->MakeDirectory(partial_));
    MARLIN_ASSIGN_OR_RETURN(FileHandle lock, io_->LockDirectory(partial_));
    if (!lock.open()) continue;  // Another process has committed or removed it meanwhile.
    MARLIN_ASSIGN_OR_RETURN(const std::string lost, FindSource(*io_, options_.source, partial_));
    if (!lost.empty()) {
      return InvalidTarget(partial_, fmt::format("is where the output is written, and holds the "
                                                 "source, {}",
                                                 Printable(lost)));
    }
    lock_ = std::move(lock);
    return {};
  }
  return Disturbed(partial_,
                   fmt::format("other processes have replaced it {} times", kLockAttempts));
}

Status OutputDirectory::RemoveStale() const {
  const std::string prefix = PartialPrefix(name_);
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io_->List(parent_));
  for (const std::string& name : names) {
    const std::string path = JoinPath(parent_, name);
    if (!IsPartialName(name, prefix) || path == partial_) continue;
    const Result<FileHandle> lock = io_->LockDirectory(path);
    if (!lock.ok() || !lock->open()) continue;  // Another process is writing to it.
    MARLIN_ASSIGN_OR_RETURN(const std::string lost, FindSource(*io_, options_.source, path));
    if (lost.empty()) MARLIN_RETURN_IF_ERROR(io_->RemoveTree(path));
  }
  return {};
}

Status OutputDirectory::Prepare() {
  MARLIN_RETURN_IF_ERROR(RestoreSwapped());
  MARLIN_RETURN_IF_ERROR(CheckTarget());
  MARLIN_RETURN_IF_ERROR(LockPartial());
  // The previous holder of the lock may have just committed.
  MARLIN_RETURN_IF_ERROR(CheckTarget());
  MARLIN_RETURN_IF_ERROR(RemoveStale());
  return options_.resume ? Status() : RemoveAllExcept({});
}

// Cleans up after a run that failed to begin. The remains of an earlier run stay if they are to be
// resumed or belong to another process.
void OutputDirectory::GiveUp() {
  const bool locked = lock_.open();
  if (!made_) return;
  if (!locked) {
    Result<FileHandle> lock = io_->LockDirectory(partial_);
    if (lock.ok()) lock_ = *std::move(lock);
  }
  if (!lock_.open() || (locked && !options_.resume)) return;
  const Result<std::vector<std::string>> names = io_->List(partial_);
  keep_ = !names.ok() || !names->empty();
}

Status OutputDirectory::Check(Io& io, const std::string& target, const Options& options) {
  OutputDirectory directory(io, options);
  MARLIN_RETURN_IF_ERROR(directory.SetNames(target, ""));
  return directory.CheckTarget();
}

Result<OutputDirectory> OutputDirectory::Begin(Io& io, const std::string& target,
                                               std::string_view fingerprint,
                                               const Options& options) {
  OutputDirectory output(io, options);
  MARLIN_RETURN_IF_ERROR(output.SetNames(target, fingerprint));
  if (const Status status = output.Prepare(); !status.ok()) {
    output.GiveUp();
    return status;
  }
  return output;
}

Status OutputDirectory::WriteFile(const std::string& name, std::string_view content) {
  MARLIN_ASSIGN_OR_RETURN(FileHandle file, io_->Create(JoinPath(partial_, name)));
  MARLIN_RETURN_IF_ERROR(io_->Write(file, 0, content.data(), static_cast<int64_t>(content.size())));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo written, io_->SyncAndClose(std::move(file)));
  AddWritten(name, written);
  return {};
}

Status OutputDirectory::RemoveAllExcept(const std::vector<std::string>& names) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> present, io_->List(partial_));
  for (const std::string& name : present) {
    const std::string path = JoinPath(partial_, name);
    MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io_->StatLink(path));
    const bool wanted = std::find(names.begin(), names.end(), name) != names.end();
    if (wanted && info.kind == FileKind::kRegular) continue;
    MARLIN_RETURN_IF_ERROR(io_->RemoveTree(path));
  }
  return {};
}

// The last check before the directory is renamed: a user, or a process that ignores the locks, may
// have removed or replaced files.
Status OutputDirectory::CheckWritten() const {
  MARLIN_ASSIGN_OR_RETURN(const bool locked, IsLocked(partial_));
  if (!locked) return Disturbed(partial_, "was replaced while it was written");
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io_->List(partial_));
  for (const std::string& name : names) {
    if (!name.starts_with(".") && !written_.contains(name)) {
      return Disturbed(JoinPath(partial_, name), "was not written by this run");
    }
  }
  for (const auto& [name, written] : written_) {
    const std::string path = JoinPath(partial_, name);
    MARLIN_ASSIGN_OR_RETURN(const FileInfo found, io_->StatLink(path));
    if (found.kind == FileKind::kMissing)
      return Disturbed(path, "was removed after it was written");
    // Some network file systems change inode numbers; the modification time stays.
    const bool same =
        found.identity == written.identity || found.modified_ns == written.modified_ns;
    if (found.kind != FileKind::kRegular || !same || found.size != written.size) {
      return Disturbed(path, fmt::format("was replaced after it was written, {} bytes by {}",
                                         written.size, found.size));
    }
  }
  return {};
}

// After the renames: flushes them and removes `rest`, which is under the partial name.
Status OutputDirectory::Finish(const char* rest) {
  Status synced = io_->SyncDirectory(parent_);
  const Status removed = io_->RemoveTree(partial_);
  keep_ = removed.ok();
  if (!synced.ok()) return synced;
  return removed.WithContext(fmt::format("the output is complete, but {} was not removed", rest));
}

// Swaps the new and the old directory and removes the old one.
Status OutputDirectory::Replace() {
  MARLIN_ASSIGN_OR_RETURN(FileHandle old, io_->LockDirectory(target_));
  if (!old.open()) return Disturbed(target_, "another process has replaced it meanwhile");
  // Another process may have replaced the target since the first check.
  MARLIN_RETURN_IF_ERROR(CheckTarget());
  MARLIN_RETURN_IF_ERROR(io_->Exchange(partial_, target_));
  // The partial name now holds the old content, and the target the new.
  lock_ = std::move(old);
  MARLIN_ASSIGN_OR_RETURN(const bool expected, IsLocked(partial_));
  if (!expected) {
    // Moved in by a process that takes no locks: move it back.
    MARLIN_RETURN_IF_ERROR(io_->Exchange(partial_, target_));
    return Disturbed(target_, "was replaced while the output was put in its place");
  }
  return Finish("what it replaced");
}

Status OutputDirectory::CommitFile(bool replace) {
  const std::string path = JoinPath(partial_, options_.file);
  if (replace) {
    // Another process may have replaced the target since the first check.
    MARLIN_RETURN_IF_ERROR(CheckTarget());
    MARLIN_RETURN_IF_ERROR(io_->RenameOver(path, target_));
  } else {
    MARLIN_RETURN_IF_ERROR(io_->RenameNew(path, target_));
  }
  return Finish("its empty directory");
}

Status OutputDirectory::Commit() {
  MARLIN_RETURN_IF_ERROR(io_->SyncDirectory(partial_));
  MARLIN_RETURN_IF_ERROR(CheckWritten());
  MARLIN_ASSIGN_OR_RETURN(const FileInfo existing, io_->StatLink(target_));
  const bool replace = existing.kind != FileKind::kMissing;
  if (replace && !options_.overwrite) {
    return Disturbed(target_, "another process has created it meanwhile");
  }
  if (!options_.file.empty()) return CommitFile(replace);
  if (replace) return Replace();
  MARLIN_RETURN_IF_ERROR(io_->RenameNew(partial_, target_));
  lock_ = FileHandle();
  return io_->SyncDirectory(parent_);
}

}  // namespace marlin
