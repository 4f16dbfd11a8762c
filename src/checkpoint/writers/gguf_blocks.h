// Which block type of GGUF holds a module exactly, and its blocks.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "checkpoint/codes/foreign_codes.h"
#include "checkpoint/readers/gguf/gguf_blocks.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// The type that holds all weights of such a module, with one level of scales, with the codes that
/// they have or wider ones. Errors:
/// kUnsupported saying what no type holds, and which formats have one.
Result<GgufStored> GgufTypeOf(const WeightsSpec& spec);

/// Encodes the columns of one matrix as rows of blocks.
class GgufEncoder {
 public:
  /// A type with two levels of scales needs HoldsSuperBlocks. Errors: kUnsupported for scales,
  /// biases or a codebook that the type does not hold.
  static Result<GgufEncoder> Make(const QuantizedWeights& matrix, const GgufStored& type);

  int64_t row_bytes() const { return row_bytes_; }
  /// The XOR that ForEachColumns is to apply to the codes.
  uint8_t flip() const { return codes_.flip; }
  /// The blocks of column n, whose codes are given, `row_bytes` bytes.
  void EncodeColumn(int64_t n, const uint8_t* codes, uint8_t* out) const;

 private:
  GgufEncoder() = default;
  static Result<GgufEncoder> MakeSuper(const QuantizedWeights& matrix, const GgufStored& type);
  Status SetParameters(const QuantizedWeights& matrix);
  void EncodeBlock(int64_t n, int64_t k, const uint8_t* codes, uint8_t* out) const;
  void EncodeTwoLevels(int64_t n, int64_t k, const uint8_t* codes, uint8_t* out) const;
  /// Appends the bytes of a parameter of the group of k to a block.
  uint8_t* Put(const std::vector<std::byte>& values, int64_t n, int64_t k, uint8_t* out) const;

  WeightsSpec spec_;
  GgufStored type_;
  UnsignedCodes codes_;
  int64_t row_bytes_ = 0;
  int shift_ = 0;                     ///< Added to codes: the type's code of the value 0 less ours.
  int64_t scale_bytes_ = 2;           ///< Size of one scale, and of one bias.
  std::vector<std::byte> scales_;     ///< [groups, n], as blocks hold them.
  std::vector<std::byte> biases_;     ///< The same; empty for types without.
  std::array<uint8_t, 256> bytes_{};  ///< The byte of every code in a type of 8 bits.
  /// With two levels of scales: the matrix, and its super scales and super biases as fp16.
  QuantizedWeights matrix_;
  std::vector<std::byte> super_scales_;
  std::vector<std::byte> super_biases_;
};

/// The factor of an NVFP4 matrix, which multiplies its scales. Errors: kUnsupported for one that
/// divides, and whose inverse gives other numbers.
Result<float> GgufGlobalScale(const QuantizedWeights& matrix);

}  // namespace marlin
