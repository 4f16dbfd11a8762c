#include "metal_sim/temporary_folder.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <utility>

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

/// The folders that exist. Never destroyed, because objects of other files may outlive it.
struct Folders {
  std::mutex mutex;
  std::set<fs::path> paths;
  pid_t process = getpid();
};

Folders& All() {
  static Folders* const folders = [] {
    std::atexit([] {
      Folders& left = All();
      // A forked process has a copy of the list, and its parent still uses the folders.
      if (left.process != getpid()) return;
      const std::lock_guard<std::mutex> lock(left.mutex);
      std::error_code ignored;
      for (const fs::path& path : left.paths) fs::remove_all(path, ignored);
    });
    return new Folders;
  }();
  return *folders;
}

}  // namespace

Result<TemporaryFolder> TemporaryFolder::Make(std::string_view prefix) {
  std::error_code error;
  std::string pattern =
      (fs::temp_directory_path(error) / (std::string(prefix) + "XXXXXX")).string();
  if (error || mkdtemp(pattern.data()) == nullptr) {
    return Status(Code::kIo, pattern + ": cannot be made");
  }
  TemporaryFolder made;
  made.path_ = pattern;
  Folders& folders = All();
  const std::lock_guard<std::mutex> lock(folders.mutex);
  folders.paths.insert(made.path_);
  return made;
}

TemporaryFolder::~TemporaryFolder() {
  if (path_.empty()) return;
  Folders& folders = All();
  {
    const std::lock_guard<std::mutex> lock(folders.mutex);
    folders.paths.erase(path_);
  }
  if (folders.process != getpid()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : path_(std::exchange(other.path_, {})) {}

TemporaryFolder& TemporaryFolder::operator=(TemporaryFolder&& other) noexcept {
  std::swap(path_, other.path_);
  return *this;
}

}  // namespace metal_sim
