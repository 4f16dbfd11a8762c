// A folder for what this build has learned of its kernels on this GPU and system.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace marlin::metal {

/// Files in ~/Library/Caches/metal-marlin/<hash of the kernels, the system's build and the GPU>.
/// Everything may fail: then nothing is kept.
class KernelCache {
 public:
  /// `system` names the build of the system, `gpu` the chip.
  KernelCache(std::string_view system, std::string_view gpu);

  /// The path of a file; empty: there is no folder.
  std::filesystem::path PathOf(std::string_view name) const;
  std::optional<std::string> Read(std::string_view name) const;
  void Write(std::string_view name, std::string_view text) const;
  /// Puts a file at its place at once, so that no other process sees a part of it. `write` makes it
  /// at the path that it is given, and returns whether it did.
  template <typename Function>
  void Replace(std::string_view name, const Function& write) const {
    const std::filesystem::path temporary = NewPath(name);
    if (!temporary.empty()) Finish(temporary, name, write(temporary));
  }

 private:
  std::filesystem::path NewPath(std::string_view name) const;
  void Finish(const std::filesystem::path& temporary, std::string_view name, bool written) const;

  std::filesystem::path folder_;  ///< Empty: none.
};

}  // namespace marlin::metal
