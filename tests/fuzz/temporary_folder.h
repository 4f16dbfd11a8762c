// A folder in memory for targets of readers that take paths. All files are written below it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "fuzz_target.h"

namespace marlin {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    const char* const given = std::getenv("TMPDIR");
    std::error_code ignored;
    const bool memory = std::filesystem::is_directory("/dev/shm", ignored);
    std::string name = given != nullptr ? given : memory ? "/dev/shm" : "/tmp";
    name += "/marlin-fuzz-XXXXXX";
    MARLIN_FUZZ_CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string Path(std::string_view name) const { return path_ + "/" + std::string(name); }
  void Write(std::string_view name, std::string_view text) const {
    std::ofstream file(Path(name), std::ios::binary | std::ios::trunc);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    MARLIN_FUZZ_CHECK(file.good());
  }
  void MakeFolder(std::string_view name) const { std::filesystem::create_directory(Path(name)); }
  void Remove(std::string_view name) const { std::filesystem::remove_all(Path(name)); }

 private:
  std::string path_;
};

}  // namespace marlin
