// GGUF files for tests, written value by value so that every malformed one can be made too.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace marlin::testing {

/// Appends a number in little-endian order.
template <typename T>
void AppendNumber(std::string* text, T value) {
  text->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

inline void AppendGgufString(std::string* text, std::string_view value) {
  AppendNumber<uint64_t>(text, value.size());
  text->append(value);
}

/// Builds a file: metadata and tensors in the order of the calls.
class GgufBuilder {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;

  GgufBuilder& Text(std::string_view key, std::string_view value) {
    AppendGgufString(Key(key, 8), value);
    return *this;
  }
  GgufBuilder& Count(std::string_view key, uint32_t value) {
    AppendNumber(Key(key, 4), value);
    return *this;
  }
  GgufBuilder& Real(std::string_view key, float value) {
    AppendNumber(Key(key, 6), value);
    return *this;
  }
  GgufBuilder& Flag(std::string_view key, bool value) {
    AppendNumber(Key(key, 7), static_cast<uint8_t>(value));
    return *this;
  }
  GgufBuilder& Texts(std::string_view key, const std::vector<std::string>& values) {
    std::string* const to = Array(key, 8, values.size());
    for (const std::string& value : values) AppendGgufString(to, value);
    return *this;
  }
  GgufBuilder& Numbers(std::string_view key, const std::vector<int32_t>& values) {
    std::string* const to = Array(key, 5, values.size());
    for (const int32_t value : values) AppendNumber(to, value);
    return *this;
  }
  GgufBuilder& Reals(std::string_view key, const std::vector<float>& values) {
    std::string* const to = Array(key, 6, values.size());
    for (const float value : values) AppendNumber(to, value);
    return *this;
  }
  /// A value with any type number and content.
  GgufBuilder& Raw(std::string_view key, uint32_t type, std::string_view bytes) {
    Key(key, type)->append(bytes);
    return *this;
  }
  /// `dims` as in the file: the contiguous one first.
  GgufBuilder& Tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type,
                      std::string data) {
    AppendGgufString(&infos_, name);
    AppendNumber<uint32_t>(&infos_, static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) AppendNumber(&infos_, dim);
    AppendNumber(&infos_, type);
    AppendNumber<uint64_t>(&infos_, data_.size());
    data_ += data;
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    ++tensors_;
    return *this;
  }

  std::string Build() const {
    std::string file = "GGUF";
    AppendNumber(&file, version);
    AppendNumber<uint64_t>(&file, tensors_);
    AppendNumber<uint64_t>(&file, values_);
    file += metadata_ + infos_;
    file.resize((file.size() + alignment - 1) / alignment * alignment);
    return file + data_;
  }
  /// Bytes before the data.
  size_t HeaderBytes() const { return Build().size() - data_.size(); }

 private:
  std::string* Key(std::string_view key, uint32_t type) {
    ++values_;
    AppendGgufString(&metadata_, key);
    AppendNumber(&metadata_, type);
    return &metadata_;
  }
  std::string* Array(std::string_view key, uint32_t type, size_t count) {
    std::string* const to = Key(key, 9);
    AppendNumber(to, type);
    AppendNumber<uint64_t>(to, count);
    return to;
  }

  std::string metadata_;
  std::string infos_;
  std::string data_;
  uint64_t values_ = 0;
  uint64_t tensors_ = 0;
};

/// The bytes of floats.
inline std::string FloatBytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

}  // namespace marlin::testing
