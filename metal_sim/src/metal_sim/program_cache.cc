#include "metal_sim/program_cache.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <utility>
#include <vector>

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kExtension = ".so";

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
  return ProgramCache(named == nullptr ? "" : named);
}

fs::path ProgramCache::PathOf(const CacheKey& key) const {
  return folder_ / (key.Name() + std::string(kExtension));
}

bool ProgramCache::Get(const CacheKey& key, const fs::path& to) const {
  if (folder_.empty()) return false;
  std::error_code error;
  const fs::path from = PathOf(key);
  if (!fs::copy_file(from, to, fs::copy_options::overwrite_existing, error)) return false;
  // A library in use is not old.
  fs::last_write_time(from, fs::file_time_type::clock::now(), error);
  return true;
}

void ProgramCache::Put(const CacheKey& key, const fs::path& from) const {
  if (folder_.empty()) return;
  std::error_code error;
  fs::create_directories(folder_, error);
  // A reader finds the whole file or none.
  std::string part = (folder_ / "part-XXXXXX").string();
  const int file = mkstemp(part.data());
  if (file < 0) return;
  close(file);
  fs::copy_file(from, part, fs::copy_options::overwrite_existing, error);
  if (!error) fs::rename(part, PathOf(key), error);
  std::error_code ignored;
  if (error) fs::remove(part, ignored);
  RemoveOldest();
}

void ProgramCache::RemoveOldest() const {
  std::error_code error;
  std::vector<std::pair<fs::file_time_type, fs::path>> libraries;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
    if (entry.path().extension() != kExtension) continue;
    const fs::file_time_type time = entry.last_write_time(error);
    if (!error) libraries.emplace_back(time, entry.path());
  }
  if (libraries.size() <= kMostLibraries) return;
  std::sort(libraries.begin(), libraries.end());
  for (size_t i = 0; i < libraries.size() - kMostLibraries; ++i) {
    fs::remove(libraries[i].second, error);
  }
}

}  // namespace metal_sim
