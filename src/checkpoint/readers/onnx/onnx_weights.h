// The weights that the nodes of an ONNX model multiply by: one function per kind of node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "checkpoint/listed_reader.h"
#include "checkpoint/readers/onnx/onnx_file.h"
#include "checkpoint/readers/onnx/onnx_uses.h"
#include "marlin/status.h"

namespace marlin {

/// An initializer with its elements in memory.
struct OnnxSource {
  OnnxTensor tensor;
  const std::byte* data = nullptr;
  std::vector<std::byte> decoded;  ///< Elements that no file holds contiguously.
  size_t file = 0;                 ///< The file, and the place of the data in it.
  int64_t offset = 0;
  const OnnxSource* scales = nullptr;  ///< The scales of its node, once that is read.

  int64_t count() const { return tensor.shape.ElementCount(); }
  /// An integer element, less than a byte or not.
  int Integer(int64_t index) const {
    const int bits = OnnxBits(tensor.type);
    const auto byte = static_cast<uint8_t>(data[index * bits / 8]);
    const int value = byte >> (index * bits % 8) & ((1 << bits) - 1);
    const bool is_signed = tensor.type == OnnxType::kI8 || tensor.type == OnnxType::kI4 ||
                           tensor.type == OnnxType::kI2;
    return is_signed && value >> (bits - 1) != 0 ? value - (1 << bits) : value;
  }
  /// Writes the matrices in the last two dimensions transposed. Precondition: OnnxDType(type).
  void WriteTransposed(std::byte* out) const;
};

/// The initializer of a name; null if there is none.
using FindOnnxSource = FunctionRef<const OnnxSource*(std::string_view name)>;

/// Quantized weights as a node describes them.
struct OnnxWeights {
  const OnnxSource* codes = nullptr;
  const OnnxSource* scales = nullptr;
  const OnnxSource* zeros = nullptr;  ///< Null: none.
  const OnnxSource* index = nullptr;  ///< The group of each k; null: none.
  WeightsSpec spec = {};
  bool stacked = false;
  Exactness exactness = Exactness::kExact;
  ListedReader::Fill fill = {};  ///< Reads the sources, which must outlive it.
  /// In place of `fill`, for a tensor that is no matrix: its values in fp32, in the codes' shape.
  std::function<void(std::byte*)> values = {};
};

/// The weights of a node; none if it has none, or if an earlier node has the same. Errors, without
/// the node's name: kMalformedFile for what does not fit, kUnsupported for other types and layouts.
using ReadOnnxNode = Result<std::vector<OnnxWeights>>(const OnnxNode& node, FindOnnxSource find,
                                                      const OnnxUses& uses);
ReadOnnxNode ReadOnnxNBits;       // MatMulNBits: codes by output feature, zeros packed alike.
ReadOnnxNode ReadOnnxDequantize;  // DequantizeLinear: a scale for all, an axis, or its blocks.
ReadOnnxNode ReadOnnxExperts;     // QMoE: stacks of the experts' matrices, codes of whole bytes.

inline Status MalformedNode(const std::string& message) { return {Code::kMalformedFile, message}; }
inline Status UnsupportedNode(const std::string& message) { return {Code::kUnsupported, message}; }
/// "\"name\" TYPE [shape]".
std::string DescribeOnnxSource(const OnnxSource& source);

}  // namespace marlin
