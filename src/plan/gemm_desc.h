// The product to plan: everything that selection may depend on, and nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "marlin/gemm.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// Trivially copyable, printable, comparable.
struct GemmDesc {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Format format = Format::kFp4E2M1;
  int64_t group_size = 0;
  ScaleType scale_type = ScaleType::kF16;
  DType a_type = DType::kF32;
  DType c_type = DType::kF32;
  bool has_zeros = false;
  bool has_biases = false;
  bool gated = false;
  bool allow_bf16_activations = false;
  bool tiled = false;      ///< PreparedWeights::Storage::tiled.
  bool marlin_w4 = false;  ///< PreparedWeights::Storage::marlin_w4.
  bool fits_f16 = false;   ///< PreparedWeights::Storage::fits_f16.
  bool fits_fp8 = false;   ///< PreparedWeights::Storage::fits_fp8.
  bool aligned = true;     ///< Rows of A begin at multiples of 16 bytes.
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;

  friend bool operator==(const GemmDesc&, const GemmDesc&) = default;
  std::string ToString() const;
};
static_assert(std::is_trivially_copyable_v<GemmDesc>);

}  // namespace marlin
