// ONNX files for tests, written field by field so that every malformed one can be made too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace marlin::testing {

inline std::string OnnxVarint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}

/// A field that is a number.
inline std::string OnnxNumber(uint64_t field, uint64_t value) {
  return OnnxVarint(field << 3) + OnnxVarint(value);
}

/// A field that is a message, a string or packed numbers.
inline std::string OnnxBytes(uint64_t field, std::string_view bytes) {
  return OnnxVarint(field << 3 | 2) + OnnxVarint(bytes.size()) + std::string(bytes);
}

/// An initializer: its element type by number, its shape, and its raw data.
inline std::string OnnxInitializer(std::string_view name, uint64_t type,
                                   const std::vector<uint64_t>& dims, std::string_view data) {
  std::string tensor;
  for (const uint64_t dim : dims) tensor += OnnxNumber(1, dim);
  return tensor + OnnxNumber(2, type) + OnnxBytes(8, name) + OnnxBytes(9, data);
}

/// An initializer whose data are in another file.
inline std::string OnnxExternal(std::string_view name, uint64_t type,
                                const std::vector<uint64_t>& dims,
                                const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string tensor;
  for (const uint64_t dim : dims) tensor += OnnxNumber(1, dim);
  tensor += OnnxNumber(2, type) + OnnxBytes(8, name) + OnnxNumber(14, 1);
  for (const auto& [key, value] : entries) {
    tensor += OnnxBytes(13, OnnxBytes(1, key) + OnnxBytes(2, value));
  }
  return tensor;
}

inline std::string OnnxNodeOf(std::string_view op, const std::vector<std::string>& inputs,
                              const std::vector<std::string>& outputs,
                              const std::vector<std::pair<std::string, int64_t>>& integers) {
  std::string node;
  for (const std::string& input : inputs) node += OnnxBytes(1, input);
  for (const std::string& output : outputs) node += OnnxBytes(2, output);
  node += OnnxBytes(3, "node") + OnnxBytes(4, op);
  for (const auto& [name, value] : integers) {
    node += OnnxBytes(
        5, OnnxBytes(1, name) + OnnxNumber(3, static_cast<uint64_t>(value)) + OnnxNumber(20, 2));
  }
  return node;
}

inline std::string OnnxModel(const std::vector<std::string>& initializers,
                             const std::vector<std::string>& nodes) {
  std::string graph;
  for (const std::string& node : nodes) graph += OnnxBytes(1, node);
  for (const std::string& tensor : initializers) graph += OnnxBytes(5, tensor);
  return OnnxNumber(1, 10) + OnnxBytes(2, "test") + OnnxBytes(7, graph);
}

}  // namespace marlin::testing
