// Runs a fuzz target once on every file of the given folders, without libFuzzer, and on truncations
// of each small file.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz_target.h"

namespace {

constexpr size_t kLargestCut = 1 << 16;

std::vector<uint8_t> ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      files.push_back(std::filesystem::absolute(entry.path()));
    }
  }
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    // Printed before the run: if it ends the process, this is the last line.
    std::printf("%s\n", path.c_str());
    std::fflush(stdout);
    const std::vector<uint8_t> bytes = ReadFile(path);
    for (size_t eighths = bytes.size() > kLargestCut ? 8 : 0; eighths <= 8; ++eighths) {
      // A copy of exactly this size, so that a sanitizer sees reads past it.
      const std::vector<uint8_t> cut(
          bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(bytes.size() * eighths / 8));
      LLVMFuzzerTestOneInput(cut.data(), cut.size());
    }
  }
  std::printf("%zu inputs replayed\n", files.size());
  return files.empty() ? 1 : 0;
}
