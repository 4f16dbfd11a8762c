#include "backends/metal/apple/kernel_cache.h"

#include <fmt/core.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <span>
#include <system_error>

#include "backends/metal/apple/built_library.h"
#include "backends/metal/plan/kernel_files.h"

namespace marlin::metal {
namespace {

namespace fs = std::filesystem;

/// FNV-1a, twice with different beginnings: 128 bits against accidents.
class Hash {
 public:
  void Add(std::span<const uint8_t> bytes) {
    for (const uint8_t byte : bytes) {
      first_ = (first_ ^ byte) * kPrime;
      second_ = (second_ ^ byte) * kPrime;
    }
  }
  void Add(std::string_view text) {
    Add(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
    const uint8_t end = 0xFF;
    Add(std::span(&end, 1));
  }
  std::string text() const { return fmt::format("{:016x}{:016x}", first_, second_); }

 private:
  static constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t first_ = 0xcbf29ce484222325;
  uint64_t second_ = 0x9e3779b97f4a7c15;
};

}  // namespace

KernelCache::KernelCache(std::string_view system, std::string_view gpu) {
  const char* const home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return;
  Hash hash;
  for (const KernelFile& file : KernelFiles()) {
    hash.Add(file.path);
    hash.Add(file.text);
  }
  hash.Add(BuiltLibrary());
  hash.Add(system);
  hash.Add(gpu);
  std::error_code error;
  fs::path folder = fs::path(home) / "Library/Caches/metal-marlin" / hash.text();
  fs::create_directories(folder, error);
  if (!error) folder_ = std::move(folder);
}

fs::path KernelCache::PathOf(std::string_view name) const {
  return folder_.empty() ? fs::path() : folder_ / name;
}

std::optional<std::string> KernelCache::Read(std::string_view name) const {
  if (folder_.empty()) return std::nullopt;
  std::ifstream file(PathOf(name), std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void KernelCache::Write(std::string_view name, std::string_view text) const {
  Replace(name, [text](const fs::path& path) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    file.close();
    return !file.fail();
  });
}

fs::path KernelCache::NewPath(std::string_view name) const {
  static std::atomic<int> count{0};
  if (folder_.empty()) return {};
  return folder_ / fmt::format("{}.{}.{}", name, getpid(), ++count);
}

void KernelCache::Finish(const fs::path& temporary, std::string_view name, bool written) const {
  std::error_code error;
  if (written) fs::rename(temporary, PathOf(name), error);
  if (!written || error) fs::remove(temporary, error);
}

}  // namespace marlin::metal
