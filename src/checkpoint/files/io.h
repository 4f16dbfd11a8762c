// All file-system access goes through Io, so that tests can make any call fail.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/printable.h"
#include "marlin/status.h"

namespace marlin {

/// "directory/name", or name alone for an empty directory.
std::string JoinPath(const std::string& directory, const std::string& name);

/// The system calls that Io makes, as InjectedError sees them.
enum class IoCall : uint8_t {
  kStat,
  kOpen,
  kMap,
  kRead,
  kList,
  kMakeDirectory,
  kLock,
  kCreate,
  kWrite,
  kSync,
  kClose,
  kRename,
  kExchange,
  kRemove,
};

/// A regular file mapped read-only. Immutable; unmapped when the last owner is destroyed.
class Mapping {
 public:
  Mapping(const std::byte* data, int64_t size) : data_(data), size_(size) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(data_), static_cast<size_t>(size_)};
  }
  /// Lets the kernel drop the pages of [offset, offset + bytes); a later access reads them again.
  /// Keeps the resident size of a streaming pass small.
  void Release(int64_t offset, int64_t bytes) const;

 private:
  const std::byte* data_;
  int64_t size_;
};

/// An open file descriptor, closed on destruction.
class FileHandle {
 public:
  FileHandle() = default;
  FileHandle(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  FileHandle(FileHandle&& other) noexcept { *this = std::move(other); }
  FileHandle& operator=(FileHandle&& other) noexcept;
  ~FileHandle();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  bool open() const { return fd_ >= 0; }
  int Take();

 private:
  int fd_ = -1;
  std::string path_;
};

enum class FileKind : uint8_t { kMissing, kRegular, kDirectory, kLink, kOther };

/// Identifies a file independently of its name: equal identities mean the same file.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  friend auto operator<=>(const FileIdentity&, const FileIdentity&) = default;
};

struct FileInfo {
  FileKind kind = FileKind::kMissing;
  int64_t size = 0;
  int64_t modified_ns = 0;
  FileIdentity identity;
};

/// The file system. Errors: kIo naming the path and the system's reason, kOutOfMemory when the
/// system had no memory for a call, kInvalidArgument for a path with a NUL. Thread-compatible.
class Io {
 public:
  Io() = default;
  virtual ~Io() = default;
  Io(const Io&) = delete;
  Io& operator=(const Io&) = delete;

  /// Follows links; a missing file is no error.
  Result<FileInfo> Stat(const std::string& path);
  /// Stat of a link itself.
  Result<FileInfo> StatLink(const std::string& path);
  /// Stat of an open file, whatever its path names by now.
  Result<FileInfo> StatOpen(const FileHandle& file);
  /// The target of a link.
  Result<std::string> ReadLink(const std::string& path);
  /// The absolute path of an existing file, with links resolved.
  Result<std::string> RealPath(const std::string& path);
  /// Errors: kIo, also for anything but a regular file.
  Result<std::shared_ptr<const Mapping>> Map(const std::string& path);
  /// A whole small file, as ReadFile of base/read_file.h.
  Result<std::string> ReadText(const std::string& path, int64_t max_bytes);
  /// Names in a directory, sorted, without "." and "..".
  Result<std::vector<std::string>> List(const std::string& directory);

  /// An existing entry of that name is not an error.
  Status MakeDirectory(const std::string& path);
  /// Takes the advisory lock of a directory. The handle is empty if the path named no directory, or
  /// another one once the lock was held. Errors: kIo, also if another process holds the lock.
  Result<FileHandle> LockDirectory(const std::string& path);
  /// Creates a file for writing; fails if the name exists.
  Result<FileHandle> Create(const std::string& path);
  Status Write(const FileHandle& file, int64_t offset, const void* data, int64_t bytes);
  /// Flushes to disk, then closes. Returns the size and identity of the file.
  Result<FileInfo> SyncAndClose(FileHandle file);
  Status SyncDirectory(const std::string& path);
  /// Renames without replacing anything.
  Status RenameNew(const std::string& from, const std::string& to);
  /// Renames a file, replacing another atomically.
  Status RenameOver(const std::string& from, const std::string& to);
  /// Swaps two directories, atomically if the file system supports it.
  Status Exchange(const std::string& a, const std::string& b);
  /// Removes a file or a directory tree; links are not followed.
  Status RemoveTree(const std::string& path);

 protected:
  /// The errno to inject into the next call; 0 lets the call run.
  virtual int InjectedError(IoCall /*call*/, const std::string& /*path*/) { return 0; }

 private:
  Status Check(IoCall call, const std::string& path);
  Status SyncDescriptor(int fd, const std::string& path);
  Result<FileInfo> StatImpl(const std::string& path, bool follow);
};

/// The real file system, for the public entry points.
class SystemIo final : public Io {};

}  // namespace marlin
