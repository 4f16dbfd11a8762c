// Compiled libraries of kernels in a folder that processes share, so that each is compiled once.
// Knows nothing of compilers: what a library depends on is the caller's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

namespace metal_sim {

/// A name for everything that a library depends on: 128 bits of the texts in hexadecimal.
class CacheKey {
 public:
  /// Texts that are added one by one are not what they are joined.
  void Add(std::string_view text);
  std::string Name() const;

 private:
  void AddByte(uint8_t byte);

  __extension__ using Uint128 = unsigned __int128;
  // FNV-1a's beginning and, in AddByte, its prime.
  Uint128 state_ = Uint128{0x6c62272e07bb0142} << 64 | 0x62b821756295c58d;
};

/// The source that a preprocessor wrote, with the folders of its line markers taken away: kernels
/// are the same wherever their sources are.
std::string WithoutFolders(std::string_view preprocessed);

/// All functions do nothing where the folder is empty, and may be called by several processes and
/// threads at once.
class ProgramCache {
 public:
  /// The oldest libraries beyond these are removed.
  static constexpr size_t kMostLibraries = 400;
  static constexpr uintmax_t kMostBytes = uintmax_t{1} << 30;

  /// The folder that METAL_SIM_CACHE of the environment names; none where it is empty. Without it,
  /// a folder of this user alone below XDG_CACHE_HOME, or below the one for temporary files.
  static ProgramCache OfEnvironment();
  explicit ProgramCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Copies a library to a path: a library that is loaded twice from one file is loaded once.
  /// False where there is none, or only a part of one, and nothing is written.
  bool Get(const CacheKey& key, const std::filesystem::path& to) const;
  /// Copies a library into the cache. An error leaves the cache as it was: it is compiled again.
  void Put(const CacheKey& key, const std::filesystem::path& from) const;
  /// Forgets a library that turned out to be none.
  void Remove(const CacheKey& key) const;

 private:
  std::filesystem::path PathOf(const CacheKey& key) const;
  void RemoveOldest() const;

  std::filesystem::path folder_;
};

}  // namespace metal_sim
