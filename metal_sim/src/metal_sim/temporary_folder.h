// A folder for files of this process. Must not know what is in it.
#pragma once

#include <filesystem>
#include <string_view>

#include "metal_sim/status.h"

namespace metal_sim {

/// A new folder in the system's temporary one, removed with its contents by the destructor, or when
/// the process exits if the object is alive then: an interpreter may never destroy what its modules
/// hold. A process that is killed, or that leaves by _exit, leaves the folder there. Move-only.
class TemporaryFolder {
 public:
  TemporaryFolder() = default;
  /// Its name is the prefix and six random characters. Errors: kIo.
  static Result<TemporaryFolder> Make(std::string_view prefix);
  ~TemporaryFolder();
  TemporaryFolder(TemporaryFolder&& other) noexcept;
  TemporaryFolder& operator=(TemporaryFolder&& other) noexcept;

  /// Empty for an object that is default-constructed or moved from.
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace metal_sim
