#include "checkpoint/output_directory.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/macros.h"

namespace marlin {
namespace {

constexpr size_t kFingerprintDigits = 16;
constexpr std::string_view kPartialMark = ".partial-";
constexpr std::string_view kConfigFile = "config.json";
constexpr std::string_view kSafetensors = ".safetensors";

std::string PartialPrefix(const std::string& name) {
  return fmt::format(".{}{}", name, kPartialMark);
}

// Whether a name is that of a partial directory: the prefix, then digits, then perhaps ".swap".
bool IsPartialName(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  if (name.ends_with(".swap")) name.remove_suffix(5);
  return name.size() == kFingerprintDigits &&
         name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Status InvalidTarget(const std::string& target, const std::string& message) {
  return Status(Code::kInvalidArgument, Printable(target) + ": " + message);
}

// Replacing removes the old directory, so it must be nothing but a checkpoint.
Status CheckReplaceable(Io& io, const std::string& target, const FileInfo& info) {
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
    is_checkpoint = is_checkpoint || name == kConfigFile || name.ends_with(kSafetensors);
  }
  if (!is_checkpoint) return InvalidTarget(target, "exists and is no checkpoint to be replaced");
  return {};
}

}  // namespace

OutputDirectory::OutputDirectory(OutputDirectory&& other) noexcept
    : io_(other.io_),
      parent_(std::move(other.parent_)),
      name_(std::move(other.name_)),
      target_(std::move(other.target_)),
      partial_(std::move(other.partial_)),
      lock_(std::move(other.lock_)),
      replaces_(other.replaces_),
      owned_(other.owned_),
      keep_(other.keep_) {
  other.keep_ = true;
}

OutputDirectory::~OutputDirectory() {
  if (keep_ || !owned_) return;
  // Nothing can be done about an error here; the next run removes what stayed.
  (void)io_->RemoveTree(partial_);
}

Status OutputDirectory::RemoveStale(std::string_view fingerprint) const {
  const std::string prefix = PartialPrefix(name_);
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io_->List(parent_));
  for (const std::string& name : names) {
    if (!IsPartialName(name, prefix) || name == prefix + std::string(fingerprint)) continue;
    const std::string path = JoinPath(parent_, name);
    const Result<FileHandle> lock = io_->LockDirectory(path);
    if (!lock.ok()) continue;  // Another process is at work in it.
    MARLIN_RETURN_IF_ERROR(io_->RemoveTree(path));
  }
  return {};
}

Result<OutputDirectory> OutputDirectory::Begin(Io& io, const std::string& target,
                                               std::string_view fingerprint,
                                               const Options& options) {
  OutputDirectory output(io);
  output.target_ = target;
  while (output.target_.size() > 1 && output.target_.back() == '/') output.target_.pop_back();
  const size_t slash = output.target_.rfind('/');
  output.name_ = output.target_.substr(slash == std::string::npos ? 0 : slash + 1);
  output.parent_ = slash == std::string::npos
                       ? std::string(1, '.')
                       : output.target_.substr(0, std::max(slash, size_t{1}));
  if (output.name_.empty() || output.name_ == "." || output.name_ == "..") {
    return InvalidTarget(target, "is not a name for a new directory");
  }
  MARLIN_ASSIGN_OR_RETURN(const FileInfo parent, io.Stat(output.parent_));
  if (parent.kind != FileKind::kDirectory) {
    return Status(Code::kIo, fmt::format("{}: no such directory to write {} into",
                                         Printable(output.parent_), Printable(output.name_)));
  }
  MARLIN_ASSIGN_OR_RETURN(const FileInfo existing, io.StatLink(output.target_));
  output.replaces_ = existing.kind != FileKind::kMissing;
  if (output.replaces_) {
    if (!options.overwrite) return InvalidTarget(target, "exists already");
    MARLIN_RETURN_IF_ERROR(CheckReplaceable(io, output.target_, existing));
  }
  MARLIN_RETURN_IF_ERROR(output.RemoveStale(fingerprint));
  output.partial_ =
      JoinPath(output.parent_, PartialPrefix(output.name_) + std::string(fingerprint));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo partial, io.StatLink(output.partial_));
  if (partial.kind == FileKind::kMissing) {
    MARLIN_RETURN_IF_ERROR(io.MakeDirectory(output.partial_));
    output.owned_ = true;
  }
  MARLIN_ASSIGN_OR_RETURN(output.lock_, io.LockDirectory(output.partial_));
  output.owned_ = true;
  if (!options.resume) MARLIN_RETURN_IF_ERROR(output.RemoveAllExcept({}));
  return output;
}

Status OutputDirectory::WriteFile(const std::string& name, std::string_view content) {
  MARLIN_ASSIGN_OR_RETURN(FileHandle file, io_->Create(JoinPath(partial_, name)));
  MARLIN_RETURN_IF_ERROR(io_->Write(file, 0, content.data(), static_cast<int64_t>(content.size())));
  return io_->SyncAndClose(std::move(file));
}

Status OutputDirectory::RemoveAllExcept(const std::vector<std::string>& names) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> present, io_->List(partial_));
  for (const std::string& name : present) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    MARLIN_RETURN_IF_ERROR(io_->RemoveTree(JoinPath(partial_, name)));
  }
  return {};
}

Status OutputDirectory::Commit() {
  MARLIN_RETURN_IF_ERROR(io_->SyncDirectory(partial_));
  if (!replaces_) {
    MARLIN_RETURN_IF_ERROR(io_->RenameNew(partial_, target_));
    keep_ = true;
    return io_->SyncDirectory(parent_);
  }
  MARLIN_RETURN_IF_ERROR(io_->Exchange(partial_, target_));
  // The partial name now holds what was replaced; from here on the new content is in place.
  Status synced = io_->SyncDirectory(parent_);
  const Status removed = io_->RemoveTree(partial_);
  keep_ = removed.ok();
  if (!synced.ok()) return synced;
  if (!removed.ok()) {
    return removed.WithContext("the output is complete, but what it replaced was not removed");
  }
  return {};
}

}  // namespace marlin
