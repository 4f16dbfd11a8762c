// The header of a safetensors file, validated before use.
//
//   u64 little endian: header bytes H | H bytes of JSON, "{" first, spaces last | data
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/status.h"

namespace marlin {

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;
inline constexpr int64_t kMaxTensorCount = int64_t{1} << 20;
inline constexpr int64_t kMaxNameBytes = 1024;
/// Tensors that this library writes are aligned to this many bytes, if their size allows it.
inline constexpr int64_t kDataAlignment = 64;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< In name order; offset counts from the start of the file.
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;
};

/// Parses and checks a whole file image. `path` is named in errors, `file` becomes
/// TensorInfo::file. Errors: kMalformedFile, kUnsupported for a known element type that this
/// library does not support; each names the tensor and the numbers.
Result<SafetensorsHeader> ParseSafetensors(std::span<const std::byte> image,
                                           const std::string& path, const std::string& file);

/// One tensor of a file to be written.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t begin = 0;  ///< From the start of the data.
  int64_t bytes = 0;
};

/// The bytes before the data: the length word, and the JSON padded with spaces so that the data
/// begins at a multiple of 64.
std::string BuildSafetensorsHeader(std::span<const SafetensorsEntry> entries,
                                   const std::map<std::string, std::string>& metadata);

/// The safetensors name of an element type: "F32", "BF16", ...
std::string_view SafetensorsDTypeName(DType dtype);

}  // namespace marlin
