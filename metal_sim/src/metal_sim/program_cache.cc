#include "metal_sim/program_cache.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kExtension = ".so";
/// Files that are being written are younger.
constexpr std::chrono::hours kOldestPart(1);

/// The end of a whole file. Loaders of libraries do not look there.
std::string EndOf(std::string_view library) {
  return fmt::format("metal-sim {:016x}", library.size());
}
const size_t kEndBytes = EndOf("").size();

std::optional<std::string> ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

bool WriteFile(const fs::path& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  return static_cast<bool>(file);
}

/// Makes the folder if it is missing. Whether nobody else can write to it: libraries of it are run.
bool IsPrivate(const fs::path& folder) {
  mkdir(folder.c_str(), S_IRWXU);
  struct stat found = {};
  return lstat(folder.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
         found.st_uid == geteuid() && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/// A folder that is made where the environment names none.
fs::path DefaultFolder() {
  std::error_code error;
  const auto path = [](const char* value) { return fs::path(value == nullptr ? "" : value); };
  fs::path caches = path(std::getenv("XDG_CACHE_HOME"));
  if (!caches.is_absolute()) {
    const fs::path home = path(std::getenv("HOME"));
    if (home.is_absolute()) caches = home / ".cache";
  }
  if (caches.is_absolute()) {
    fs::create_directories(caches, error);
    if (fs::is_directory(caches, error)) return caches / "metal-sim";
  }
  return fs::temp_directory_path(error) / fmt::format("metal-sim-cache-{}", geteuid());
}

/// The file name in a line marker, `# 12 "folder/file.metal" 2`, without its folder.
std::string WithoutFolder(std::string_view marker) {
  const size_t open = marker.find('"');
  const size_t close = marker.rfind('"');
  if (open == marker.npos || close == open) return std::string(marker);
  const size_t slash = marker.substr(0, close).rfind('/');
  if (slash == marker.npos || slash < open) return std::string(marker);
  return std::string(marker.substr(0, open + 1)) + std::string(marker.substr(slash + 1));
}

}  // namespace

void CacheKey::AddByte(uint8_t byte) { state_ = (state_ ^ byte) * ((Uint128{1} << 88) + 0x13b); }

void CacheKey::Add(std::string_view text) {
  for (const char c : text) AddByte(static_cast<uint8_t>(c));
  for (size_t size = text.size(), i = 0; i < sizeof(size); ++i, size >>= 8) {
    AddByte(static_cast<uint8_t>(size));
  }
}

std::string CacheKey::Name() const {
  return fmt::format("{:016x}{:016x}", static_cast<uint64_t>(state_ >> 64),
                     static_cast<uint64_t>(state_));
}

std::string WithoutFolders(std::string_view preprocessed) {
  std::string text;
  text.reserve(preprocessed.size());
  while (!preprocessed.empty()) {
    const size_t end = std::min(preprocessed.find('\n'), preprocessed.size() - 1) + 1;
    const std::string_view line = preprocessed.substr(0, end);
    preprocessed.remove_prefix(end);
    if (line.starts_with("# ") || line.starts_with("#line ")) {
      text += WithoutFolder(line);
    } else {
      text += line;
    }
  }
  return text;
}

ProgramCache ProgramCache::OfEnvironment() {
  const char* const named = std::getenv("METAL_SIM_CACHE");
  if (named != nullptr) return ProgramCache(named);
  const fs::path folder = DefaultFolder();
  return ProgramCache(IsPrivate(folder) ? folder : fs::path());
}

fs::path ProgramCache::PathOf(const CacheKey& key) const {
  return folder_ / (key.Name() + std::string(kExtension));
}

bool ProgramCache::Get(const CacheKey& key, const fs::path& to) const {
  if (folder_.empty()) return false;
  const fs::path from = PathOf(key);
  const std::optional<std::string> file = ReadFile(from);
  if (!file || file->size() < kEndBytes) return false;
  const std::string_view library = std::string_view(*file).substr(0, file->size() - kEndBytes);
  if (!file->ends_with(EndOf(library)) || !WriteFile(to, library)) return false;
  // A library in use is not old.
  std::error_code error;
  fs::last_write_time(from, fs::file_time_type::clock::now(), error);
  return true;
}

void ProgramCache::Put(const CacheKey& key, const fs::path& from) const {
  if (folder_.empty()) return;
  const std::optional<std::string> library = ReadFile(from);
  std::error_code error;
  fs::create_directories(folder_, error);
  // A reader finds the whole file or none.
  std::string part = (folder_ / "part-XXXXXX").string();
  const int file = mkstemp(part.data());
  if (file < 0) return;
  close(file);
  bool written = library && WriteFile(part, *library + EndOf(*library));
  if (written) {
    fs::rename(part, PathOf(key), error);
    written = !error;
  }
  if (!written) fs::remove(part, error);
  RemoveOldest();
}

void ProgramCache::Remove(const CacheKey& key) const {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove(PathOf(key), ignored);
}

void ProgramCache::RemoveOldest() const {
  struct Library {
    fs::file_time_type time;
    fs::path path;
    uintmax_t bytes;
  };
  std::error_code error;
  std::vector<Library> libraries;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
    const fs::file_time_type time = entry.last_write_time(error);
    if (error) continue;  // Another process removed it.
    if (entry.path().extension() == kExtension) {
      const uintmax_t bytes = entry.file_size(error);
      if (!error) libraries.push_back({time, entry.path(), bytes});
    } else if (fs::file_time_type::clock::now() - time > kOldestPart) {
      fs::remove(entry.path(), error);  // Its writer ended before its end.
    }
  }
  std::sort(libraries.begin(), libraries.end(),
            [](const Library& a, const Library& b) { return a.time > b.time; });
  uintmax_t kept = 0;
  for (size_t i = 0; i < libraries.size(); ++i) {
    kept += libraries[i].bytes;
    if (i >= kMostLibraries || kept > kMostBytes) fs::remove(libraries[i].path, error);
  }
}

}  // namespace metal_sim
