// The structure of an ONNX file: initializers and nodes of its main graph, all sizes checked, no
// values decoded. A file is a protocol buffer; fields that are not needed are passed over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// Element types, with their numbers in the file.
enum class OnnxType : int64_t {
  kF32 = 1,
  kU8 = 2,
  kI8 = 3,
  kU16 = 4,
  kI16 = 5,
  kI32 = 6,
  kI64 = 7,
  kString = 8,
  kBool = 9,
  kF16 = 10,
  kF64 = 11,
  kU32 = 12,
  kU64 = 13,
  kBf16 = 16,
  kF8E4M3 = 17,
  kF8E5M2 = 19,
  kU4 = 21,
  kI4 = 22,
  kF4E2M1 = 23,
  kF8E8M0 = 24,
  kU2 = 25,
  kI2 = 26,
};

/// Bits of an element; 0 for types that cannot be read.
int OnnxBits(OnnxType type);
/// The name of a type in the format's own words.
std::string OnnxTypeName(OnnxType type);
/// Element types in the store; nothing for types of less than a byte, which are stored as bytes.
std::optional<DType> OnnxDType(OnnxType type);

/// An initializer. Views are of the mapping, which must outlive it.
struct OnnxTensor {
  std::string_view name;
  OnnxType type = OnnxType::kF32;
  Shape shape;
  int64_t bytes = 0;         ///< Size of the elements, the lowest bits first.
  std::string_view data;     ///< The elements where they are contiguous in the file.
  std::string_view numbers;  ///< Otherwise variable-length integers, or empty.
  bool external = false;     ///< The elements are in another file:
  std::string_view location;
  int64_t offset = 0;
};

/// A node and the attributes that are integers.
struct OnnxNode {
  std::string_view name;
  std::string_view op;
  std::string_view domain;
  std::vector<std::string_view> inputs;
  std::vector<std::string_view> outputs;
  std::vector<std::pair<std::string_view, int64_t>> integers;
  std::vector<int64_t> permutation;  ///< The attribute "perm".
  std::string_view quant_type;       ///< The attribute of this name; empty: absent.

  int64_t Integer(std::string_view attribute, int64_t fallback) const;
  std::string_view Input(size_t i) const {
    return i < inputs.size() ? inputs[i] : std::string_view();
  }
};

struct OnnxFile {
  std::vector<OnnxTensor> tensors;
  std::vector<OnnxNode> nodes;
};

/// Parses a file. `where` names it in messages. Errors: kMalformedFile with the position;
/// kUnsupported for elements that cannot be read, and for sparse initializers.
Result<OnnxFile> ParseOnnx(std::string_view file, const std::string& where);

/// Decodes `numbers` of a tensor. Errors: kMalformedFile for another count than the shape's.
Result<std::vector<std::byte>> DecodeOnnxNumbers(const OnnxTensor& tensor,
                                                 const std::string& where);

}  // namespace marlin
