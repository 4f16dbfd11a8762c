// The GEMM problem: everything that selection and plans may depend on, and nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "marlin/gemm.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// Properties of prepared weights that decide which kernels can read them. The backend that
/// prepared the weights fills them in; GemmDesc copies them whole.
struct WeightTraits {
  bool tiled = false;  ///< In the matrix units' tile layout; otherwise only slow kernels read it.
  bool marlin_w4 = false;  ///< In that public layout (PrepareOptions).
  bool sparse = false;     ///< 2:4: values and metadata, not expanded.
  bool fits_f16 = false;   ///< The tiles' weights keep their precision in fp16.
  bool fits_fp8 = false;   ///< The tiles' codes (minus their zeros) are e4m3 numbers.

  friend bool operator==(const WeightTraits&, const WeightTraits&) = default;
};

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
  Activation activation = Activation::kNone;
  bool allow_bf16_activations = false;
  WeightTraits weights;
  bool aligned = true;  ///< Rows of A begin at multiples of 16 bytes.
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;

  friend bool operator==(const GemmDesc&, const GemmDesc&) = default;
  std::string ToString() const;
};
static_assert(std::is_trivially_copyable_v<GemmDesc>);

}  // namespace marlin
