// Files for checkpoint tests: a temporary directory and hand-made safetensors images.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/scalars.h"
#include "checkpoint/files/safetensors.h"

namespace marlin::testing {

/// A directory on which fsync is free, for tests that call it a thousand times.
inline std::filesystem::path MemoryDirectory() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code error;
  return std::filesystem::is_directory(memory, error) && access(memory.c_str(), W_OK) == 0
             ? memory
             : std::filesystem::temp_directory_path();
}

/// A fresh directory, removed with its content at the end of the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() : TemporaryDirectory(std::filesystem::temp_directory_path()) {}
  explicit TemporaryDirectory(const std::filesystem::path& parent) {
    std::string pattern = (parent / "marlin-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  /// Names of the entries, sorted.
  std::vector<std::string> Entries() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::string path_;
};

inline void WriteFile(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  ASSERT_TRUE(file.good()) << path;
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Returns a file image around a hand-written header: length, header, data.
inline std::string RawSafetensors(const std::string& header, const std::string& data) {
  std::string image;
  for (uint64_t i = 0, length = header.size(); i < 8; ++i, length >>= 8) {
    image += static_cast<char>(length & 0xff);
  }
  return image + header + data;
}

struct TestTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::string data;
};

/// Returns a valid image with tensors in the given order.
inline std::string BuildSafetensors(const std::vector<TestTensor>& tensors) {
  std::vector<SafetensorsEntry> entries;
  std::string data;
  for (const TestTensor& tensor : tensors) {
    entries.push_back({tensor.name, tensor.dtype, tensor.shape, static_cast<int64_t>(data.size()),
                       static_cast<int64_t>(tensor.data.size())});
    data += tensor.data;
  }
  return BuildSafetensorsHeader(entries, {}) + data;
}

/// Returns normally distributed weights from a fixed seed, as the bytes of a bf16 tensor.
inline TestTensor RandomBf16(const std::string& name, Shape shape, uint32_t seed,
                             float deviation = 0.05f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  TestTensor tensor{name, DType::kBf16, shape, {}};
  for (int64_t i = 0; i < shape.ElementCount(); ++i) {
    const uint16_t bits = FloatToBf16(normal(random));
    tensor.data.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
  }
  return tensor;
}

/// The same values in f32.
inline TestTensor RandomF32(const std::string& name, Shape shape, uint32_t seed) {
  const TestTensor half = RandomBf16(name, shape, seed);
  TestTensor tensor{name, DType::kF32, shape, {}};
  for (size_t i = 0; i < half.data.size(); i += 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, half.data.data() + i, sizeof(bits));
    const float value = Bf16ToFloat(bits);
    tensor.data.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return tensor;
}

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace marlin::testing
