// QMoE of ONNX: the experts' matrices as stacks of rows, codes of whole bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "base/thread_pool.h"
#include "checkpoint/readers/onnx/onnx_file.h"
#include "layout/weights_buffer.h"
#include "marlin/status.h"

namespace marlin {

/// Element types in the store; those of less than a byte are stored as bytes.
std::optional<DType> OnnxDType(OnnxType type);

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

/// One of the matrices [experts, n, k] of a QMoE node.
struct OnnxExperts {
  const OnnxSource* codes = nullptr;
  const OnnxSource* scales = nullptr;
  const OnnxSource* zeros = nullptr;  ///< Null: none.
  bool zeros_along_n = false;         ///< Without blocks zeros are packed along n, else along k.
  int64_t block_rows = 1;             ///< Rows that share a scale.
  WeightsSpec spec;

  int64_t ZeroRows() const { return zeros_along_n ? spec.experts : spec.experts * spec.n; }
  int64_t ZerosInRow() const { return zeros_along_n ? spec.n : GroupCount(spec); }
  /// Zero `index` of a row, a code of `bits` bits.
  int Zero(int64_t row, int64_t index, int bits) const;
};

/// The initializer of a name; null if there is none.
using FindOnnxSource = FunctionRef<const OnnxSource*(std::string_view name)>;

/// The matrices of a node, checked: fc1, fc2, and fc3 if it has one. Errors, without the node's
/// name: kMalformedFile for what does not fit, kUnsupported for other layouts and types.
Result<std::vector<OnnxExperts>> FindOnnxExperts(const OnnxNode& node, FindOnnxSource find);

/// Fills weights of the spec.
void FillOnnxExperts(const OnnxExperts& m, WeightsBuffer* buffer, ThreadPool& pool);

}  // namespace marlin
