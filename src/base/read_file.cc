#include "base/read_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "base/path_check.h"
#include "base/printable.h"

namespace marlin {
namespace {

constexpr int64_t kFirstRead = 4096;

Status Failed(const std::string& name, const std::string& why) {
  return Status(Code::kIo, Printable(name) + ": " + why);
}

Status SystemError(const std::string& name, const char* call, int error) {
  return Failed(name,
                std::string("cannot ") + call + ": " + std::generic_category().message(error));
}

// Reads to the end. `expected_bytes` is a hint: the file may change meanwhile, and files of /proc
// report a size of 0.
Result<std::string> ReadDescriptor(int fd, const std::string& name, int64_t expected_bytes,
                                   int64_t max_bytes) {
  std::string text;
  // One byte more than expected, so that the read that hits end of file needs no larger buffer.
  int64_t room = std::min(std::max(expected_bytes, kFirstRead), max_bytes) + 1;
  int64_t used = 0;
  for (;;) {
    text.resize(static_cast<size_t>(room));
    const ssize_t count = ::read(fd, text.data() + used, static_cast<size_t>(room - used));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError(name, "read", errno);
    if (count == 0) break;
    used += count;
    if (used > max_bytes) {
      return Status(Code::kMalformedFile, Printable(name) + ": more than " +
                                              std::to_string(max_bytes) +
                                              " bytes, which are the most that are accepted");
    }
    if (used == room) room = std::min(2 * room, max_bytes + 1);
  }
  text.resize(static_cast<size_t>(used));
  return text;
}

Result<std::string> ReadOpen(int fd, const std::string& path, int64_t max_bytes) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return SystemError(path, "look at", errno);
  if (S_ISDIR(info.st_mode)) return Failed(path, "is a directory, which is not a regular file");
  if (!S_ISREG(info.st_mode)) return Failed(path, "is not a regular file");
  if (info.st_size > max_bytes) {
    return Status(Code::kMalformedFile, Printable(path) + ": " + std::to_string(info.st_size) +
                                            " bytes, at most " + std::to_string(max_bytes) +
                                            " are accepted");
  }
  return ReadDescriptor(fd, path, info.st_size, max_bytes);
}

}  // namespace

Result<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  // O_NONBLOCK: opening a pipe must not wait for a writer. O_NOCTTY: opening a terminal must not
  // make it the controlling terminal.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return Failed(path, std::generic_category().message(errno));
  try {
    Result<std::string> text = ReadOpen(fd, path, max_bytes);
    ::close(fd);
    return text;
  } catch (const std::bad_alloc&) {
    ::close(fd);
    return Status(Code::kOutOfMemory, Printable(path) + ": no memory to read it");
  }
}

Result<std::string> ReadStandardInput(int64_t max_bytes) {
  try {
    return ReadDescriptor(STDIN_FILENO, "standard input", 0, max_bytes);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "standard input: no memory to read it");
  }
}

}  // namespace marlin
