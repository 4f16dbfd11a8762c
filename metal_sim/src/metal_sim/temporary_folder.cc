#include "metal_sim/temporary_folder.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

/// The folders that exist, each with the process that made it: a forked process has a copy of the
/// list, and its parent still uses the folders. Never destroyed, because objects of other files may
/// outlive it.
struct Folders {
  std::mutex mutex;
  std::map<fs::path, pid_t> makers;
};

Folders& All() {
  static Folders* const folders = [] {
    std::atexit([] {
      Folders& left = All();
      const std::lock_guard<std::mutex> lock(left.mutex);
      std::error_code ignored;
      for (const auto& [path, maker] : left.makers) {
        if (maker == getpid()) fs::remove_all(path, ignored);
      }
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
  folders.makers.emplace(made.path_, getpid());
  return made;
}

TemporaryFolder::~TemporaryFolder() {
  if (path_.empty()) return;
  Folders& folders = All();
  bool is_ours = false;
  {
    const std::lock_guard<std::mutex> lock(folders.mutex);
    const auto found = folders.makers.find(path_);
    is_ours = found != folders.makers.end() && found->second == getpid();
    if (found != folders.makers.end()) folders.makers.erase(found);
  }
  std::error_code ignored;
  if (is_ours) fs::remove_all(path_, ignored);
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : path_(std::exchange(other.path_, {})) {}

TemporaryFolder& TemporaryFolder::operator=(TemporaryFolder&& other) noexcept {
  std::swap(path_, other.path_);
  return *this;
}

}  // namespace metal_sim
