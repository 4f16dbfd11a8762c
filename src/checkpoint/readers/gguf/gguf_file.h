// The structure of a GGUF file: its metadata and its tensors, all sizes checked, no values decoded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// The types of metadata values, with their numbers in the file.
enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

/// A metadata value where it lies in the file. An array is a count and a run of elements.
struct GgufValue {
  GgufType type = GgufType::kU8;  ///< Type of the value, or of an array's elements.
  bool is_array = false;
  int64_t count = 1;
  std::string_view bytes;  ///< The value, or all elements of the array.
};

/// The metadata of a file. Values are views of the mapping, which must outlive it.
class GgufMetadata {
 public:
  /// Errors: a message for a second value of one key.
  Status Add(std::string_view key, const GgufValue& value);

  const GgufValue* Find(std::string_view key) const;
  bool Has(std::string_view key) const { return Find(key) != nullptr; }
  /// All keys that begin with a prefix, sorted.
  std::vector<std::string_view> Keys(std::string_view prefix) const;
  /// Nothing if the key is absent or not of that kind; integers of every width count as integers,
  /// and as reals.
  std::optional<int64_t> Integer(std::string_view key) const;
  std::optional<double> Real(std::string_view key) const;
  std::optional<bool> Bool(std::string_view key) const;
  std::optional<std::string_view> Text(std::string_view key) const;
  /// The integers of an array, or of a single integer.
  std::optional<std::vector<int64_t>> Integers(std::string_view key) const;
  /// The flags of an array, 0 or 1.
  std::optional<std::vector<int64_t>> Flags(std::string_view key) const;
  std::optional<std::vector<double>> Reals(std::string_view key) const;
  std::optional<std::vector<std::string_view>> Texts(std::string_view key) const;

 private:
  std::map<std::string_view, GgufValue> values_;
};

/// The shortest decimal of an fp32, for JSON: 1e-05 instead of 9.99999974738e-06.
double Shortest(double value);

/// One tensor of a file. `dims` is the shape in C order: the last dimension is contiguous.
struct GgufTensor {
  std::string_view name;
  Shape dims;
  uint32_t type = 0;   ///< A number of the block table, gguf_blocks.h.
  int64_t offset = 0;  ///< Place of the data in the file.
  int64_t bytes = 0;
};

struct GgufFile {
  GgufMetadata metadata;
  std::vector<GgufTensor> tensors;  ///< In file order.
  int64_t data_begin = 0;
};

/// Parses a file. `where` names it in messages. Errors: kMalformedFile with position and numbers;
/// kUnsupported for another version or byte order, and for tensor types that cannot be read.
Result<GgufFile> ParseGguf(std::string_view file, const std::string& where);

}  // namespace marlin
