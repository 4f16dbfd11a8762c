#include "checkpoint/files/io.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "base/checked.h"
#include "base/macros.h"
#include "base/path_check.h"
#include "base/read_file.h"

namespace marlin {
namespace {

std::string_view CallName(IoCall call) {
  switch (call) {
    case IoCall::kStat:
      return "look at";
    case IoCall::kOpen:
      return "open";
    case IoCall::kMap:
      return "map";
    case IoCall::kRead:
      return "read";
    case IoCall::kList:
      return "list";
    case IoCall::kMakeDirectory:
      return "create directory";
    case IoCall::kLock:
      return "lock";
    case IoCall::kCreate:
      return "create";
    case IoCall::kWrite:
      return "write";
    case IoCall::kSync:
      return "flush";
    case IoCall::kClose:
      return "close";
    case IoCall::kRename:
    case IoCall::kExchange:
      return "rename";
    case IoCall::kRemove:
      return "remove";
  }
  return "use";
}

Status SystemError(IoCall call, const std::string& path, int error) {
  const Code code = error == ENOMEM ? Code::kOutOfMemory : Code::kIo;
  return Status(code, fmt::format("{}: cannot {}: {}", Printable(path), CallName(call),
                                  std::generic_category().message(error)));
}

FileKind KindOf(mode_t mode) {
  if (S_ISREG(mode)) return FileKind::kRegular;
  if (S_ISDIR(mode)) return FileKind::kDirectory;
  if (S_ISLNK(mode)) return FileKind::kLink;
  return FileKind::kOther;
}

FileInfo InfoOf(const struct stat& from) {
  FileInfo info;
  info.kind = KindOf(from.st_mode);
  info.size = from.st_size;
#if defined(__APPLE__)
  const struct timespec modified = from.st_mtimespec;
#else
  const struct timespec modified = from.st_mtim;
#endif
  info.modified_ns = static_cast<int64_t>(modified.tv_sec) * 1'000'000'000 + modified.tv_nsec;
  info.identity = {static_cast<uint64_t>(from.st_dev), static_cast<uint64_t>(from.st_ino)};
  return info;
}

// renameat2 with flags where the C library has it; elsewhere -1 with errno ENOSYS.
int RenameWithFlags(const std::string& from, const std::string& to, bool exchange) {
#if defined(__linux__) && defined(RENAME_EXCHANGE)
  return renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                   exchange ? RENAME_EXCHANGE : RENAME_NOREPLACE);
#elif defined(__APPLE__)
  return renamex_np(from.c_str(), to.c_str(), exchange ? RENAME_SWAP : RENAME_EXCL);
#else
  errno = ENOSYS;
  return -1;
#endif
}

bool IsFlagUnsupported(int error) {
  return error == ENOSYS || error == EINVAL || error == ENOTSUP || error == EOPNOTSUPP;
}

}  // namespace

std::string JoinPath(const std::string& directory, const std::string& name) {
  if (directory.empty()) return name;
  return directory.back() == '/' ? directory + name : directory + "/" + name;
}

Mapping::~Mapping() {
  if (size_ > 0) munmap(const_cast<std::byte*>(data_), static_cast<size_t>(size_));
}

void Mapping::Release(int64_t offset, int64_t bytes) const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  // Only whole pages inside the range: pages shared with its neighbours may be in use.
  const int64_t begin = RoundUp(offset, page);
  const int64_t end = (offset + bytes) / page * page;
  if (begin >= end) return;
  madvise(const_cast<std::byte*>(data_) + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
  if (this == &other) return *this;
  if (fd_ >= 0) ::close(fd_);
  fd_ = other.Take();
  path_ = std::move(other.path_);
  return *this;
}

FileHandle::~FileHandle() {
  if (fd_ >= 0) ::close(fd_);
}

int FileHandle::Take() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

Status Io::Check(IoCall call, const std::string& path) {
  MARLIN_RETURN_IF_ERROR(CheckPath(path));
  const int error = InjectedError(call, path);
  return error == 0 ? Status() : SystemError(call, path, error);
}

Result<FileInfo> Io::StatImpl(const std::string& path, bool follow) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kStat, path));
  struct stat info {};
  const int rc = follow ? ::stat(path.c_str(), &info) : ::lstat(path.c_str(), &info);
  if (rc == 0) return InfoOf(info);
  if (errno == ENOENT) return FileInfo{};
  return SystemError(IoCall::kStat, path, errno);
}

Result<FileInfo> Io::StatOpen(const FileHandle& file) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kStat, file.path()));
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return SystemError(IoCall::kStat, file.path(), errno);
  return InfoOf(info);
}

Result<std::string> Io::ReadLink(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kStat, path));
  std::string text(PATH_MAX, '\0');
  const ssize_t length = ::readlink(path.c_str(), text.data(), text.size());
  if (length < 0) return SystemError(IoCall::kStat, path, errno);
  text.resize(static_cast<size_t>(length));
  return text;
}

Result<std::string> Io::RealPath(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kStat, path));
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
  if (real == nullptr) return SystemError(IoCall::kStat, path, errno);
  return std::string(real.get());
}

Result<FileInfo> Io::Stat(const std::string& path) { return StatImpl(path, true); }
Result<FileInfo> Io::StatLink(const std::string& path) { return StatImpl(path, false); }

Result<std::shared_ptr<const Mapping>> Io::Map(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kOpen, path));
  // O_NONBLOCK: opening a pipe must not wait for a writer.
  const FileHandle file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK), path);
  if (!file.open()) return SystemError(IoCall::kOpen, path, errno);
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kMap, path));
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return SystemError(IoCall::kMap, path, errno);
  if (!S_ISREG(info.st_mode)) {
    return Status(Code::kIo, Printable(path) + ": not a regular file");
  }
  if (info.st_size == 0) return std::make_shared<const Mapping>(nullptr, 0);
  void* data =
      ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, file.fd(), 0);
  if (data == MAP_FAILED) return SystemError(IoCall::kMap, path, errno);
  return std::make_shared<const Mapping>(static_cast<const std::byte*>(data), info.st_size);
}

Result<std::string> Io::ReadText(const std::string& path, int64_t max_bytes) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kOpen, path));
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kRead, path));
  return ReadFile(path, max_bytes);
}

Result<std::vector<std::string>> Io::List(const std::string& directory) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kList, directory));
  DIR* stream = ::opendir(directory.c_str());
  if (stream == nullptr) return SystemError(IoCall::kList, directory, errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(stream);
  if (error != 0) return SystemError(IoCall::kList, directory, error);
  std::sort(names.begin(), names.end());
  return names;
}

Status Io::MakeDirectory(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kMakeDirectory, path));
  if (::mkdir(path.c_str(), 0777) == 0 || errno == EEXIST) return {};
  return SystemError(IoCall::kMakeDirectory, path, errno);
}

Result<FileHandle> Io::LockDirectory(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kOpen, path));
  FileHandle handle(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY | O_NOFOLLOW), path);
  if (!handle.open() && errno == ENOENT) return FileHandle();
  if (!handle.open()) return SystemError(IoCall::kLock, path, errno);
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kLock, path));
  if (::flock(handle.fd(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return Status(Code::kIo, Printable(path) + ": another process is writing it");
    }
    return SystemError(IoCall::kLock, path, errno);
  }
  // Another process may have renamed or removed the directory between the two calls.
  MARLIN_ASSIGN_OR_RETURN(const FileInfo locked, StatOpen(handle));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo named, StatLink(path));
  if (named.identity != locked.identity) return FileHandle();
  return handle;
}

Result<FileHandle> Io::Create(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kCreate, path));
  // O_EXCL: opening an existing pipe would block, and an existing link would be written through.
  FileHandle file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666),
                  path);
  if (!file.open()) return SystemError(IoCall::kCreate, path, errno);
  return file;
}

Status Io::Write(const FileHandle& file, int64_t offset, const void* data, int64_t bytes) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kWrite, file.path()));
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(file.fd(), next, static_cast<size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return SystemError(IoCall::kWrite, file.path(), written == 0 ? ENOSPC : errno);
    }
    next += written;
    offset += written;
    bytes -= written;
  }
  return {};
}

Status Io::SyncDescriptor(int fd, const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kSync, path));
  if (::fsync(fd) != 0) return SystemError(IoCall::kSync, path, errno);
  return {};
}

Result<FileInfo> Io::SyncAndClose(FileHandle file) {
  MARLIN_RETURN_IF_ERROR(SyncDescriptor(file.fd(), file.path()));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo written, StatOpen(file));
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kClose, file.path()));
  if (::close(file.Take()) != 0) return SystemError(IoCall::kClose, file.path(), errno);
  return written;
}

Status Io::SyncDirectory(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kOpen, path));
  const FileHandle handle(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY), path);
  if (!handle.open()) return SystemError(IoCall::kOpen, path, errno);
  return SyncDescriptor(handle.fd(), path);
}

Status Io::RenameOver(const std::string& from, const std::string& to) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kRename, to));
  if (::rename(from.c_str(), to.c_str()) != 0) return SystemError(IoCall::kRename, to, errno);
  return {};
}

Status Io::RenameNew(const std::string& from, const std::string& to) {
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kRename, to));
  if (RenameWithFlags(from, to, /*exchange=*/false) == 0) return {};
  if (!IsFlagUnsupported(errno)) return SystemError(IoCall::kRename, to, errno);
  MARLIN_ASSIGN_OR_RETURN(const FileInfo target, StatLink(to));
  if (target.kind != FileKind::kMissing) return SystemError(IoCall::kRename, to, EEXIST);
  return RenameOver(from, to);
}

Status Io::Exchange(const std::string& a, const std::string& b) {
  int error = InjectedError(IoCall::kExchange, b);
  if (error == 0 && RenameWithFlags(a, b, /*exchange=*/true) == 0) return {};
  if (error == 0) error = errno;
  if (!IsFlagUnsupported(error)) return SystemError(IoCall::kExchange, b, error);
  // Three renames: between the first two `b` is missing, which is unavoidable without renameat2.
  const std::string aside = a + ".swap";
  MARLIN_RETURN_IF_ERROR(RenameOver(b, aside));
  if (const Status status = RenameOver(a, b); !status.ok()) {
    const Status restored = RenameOver(aside, b);
    return restored.ok() ? status : restored.WithContext("the old content is " + Printable(aside));
  }
  return RenameOver(aside, a);
}

Status Io::RemoveTree(const std::string& path) {
  MARLIN_ASSIGN_OR_RETURN(const FileInfo info, StatLink(path));
  if (info.kind == FileKind::kMissing) return {};
  if (info.kind == FileKind::kDirectory) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, List(path));
    for (const std::string& name : names) {
      MARLIN_RETURN_IF_ERROR(RemoveTree(JoinPath(path, name)));
    }
  }
  MARLIN_RETURN_IF_ERROR(Check(IoCall::kRemove, path));
  if (::remove(path.c_str()) != 0) return SystemError(IoCall::kRemove, path, errno);
  return {};
}

}  // namespace marlin
