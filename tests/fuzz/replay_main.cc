// Runs a fuzz target once on every file of the folders given, without libFuzzer, and on each file
// cut short at a few places.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz_target.h"

int main(int argc, char** argv) {
  size_t count = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> bytes((std::istreambuf_iterator<char>(file)),
                                    std::istreambuf_iterator<char>());
      const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
      for (size_t eighths = 0; eighths <= 8; ++eighths) {
        // A copy of exactly this size, so that a sanitizer sees reads past it.
        const std::vector<uint8_t> cut(data, data + bytes.size() * eighths / 8);
        LLVMFuzzerTestOneInput(cut.data(), cut.size());
      }
      ++count;
    }
  }
  std::printf("%zu inputs replayed\n", count);
  return count > 0 ? 0 : 1;
}
