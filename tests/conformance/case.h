// One conformance case: all parameters of its data, encoded in a name that reproduces it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "marlin/format.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin::conformance {

/// The property that a case checks.
enum class Check : uint8_t {
  kGemm,            ///< One GEMM against the reference.
  kDequantize,      ///< Dequantize of the device against the reference.
  kBatchInvariant,  ///< Every row alone and in batches of 2..64: the same bits.
  kThreads,         ///< 1, 2, 3 and 5 threads: the same bits.
  kRowPermutation,  ///< Permuted rows of A give permuted rows of the output.
  kRepeat,          ///< Repeated runs give one hash.
  kStreams,         ///< The same GEMM from 16 threads at once, each on its own stream: one hash.
  kPeriodic,        ///< A small lattice problem tiled along m and n; its output must be periodic.
  kChain,           ///< Dependent GEMMs, each launched (with PDL) before its input is complete.
};

enum class ZeroKind : uint8_t { kNone, kInteger, kFractional };

enum class DataClass : uint8_t {
  kLattice,      ///< Small integers, power-of-two scales: every partial sum is exact.
  kLatticeWide,  ///< The same with activations of up to 11 bits: two bf16 terms.
  kLatticeInt8,  ///< The same with activations that int8 blocks represent exactly.
  kGaussian,
  kHeavy,         ///< Outlier channels and scales over several orders of magnitude.
  kOneHot,        ///< One nonzero activation per row: detects permutations.
  kExtremes,      ///< Largest and smallest codes, large activations.
  kSubnormal,     ///< Scales in the subnormal range of their type.
  kNonFinite,     ///< One row with a NaN and one with an Inf among Gaussian rows.
  kLatticeSmall,  ///< The lattice with fewer bits, so that a chain of two GEMMs is exact.
};

struct Case {
  Check check = Check::kGemm;
  Format format = Format::kFp4E2M1;
  std::string backend = "cpu";  ///< Backend of the kernels under test: "cpu", "cuda", "metal".
  std::string kernel;           ///< A kernel's name, or "planned": kernel selection picks one.
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  int64_t group_size = 32;  ///< k for unquantized formats.
  int experts = 1;          ///< Stacked matrices; the GEMM uses the last one.
  bool padded = false;      ///< Rows of A and the output are strided.
  bool misaligned = false;  ///< Base pointers are aligned to one element only.
  ScaleType scale_type = ScaleType::kF16;
  ZeroKind zero = ZeroKind::kNone;
  ScaleType zero_type = ScaleType::kF16;
  bool global_divides = false;  ///< The global scale of e4m3 scales divides them.
  bool weight_biases = false;
  bool user_codebook = false;
  bool sparse = false;  ///< 2:4 weights.
  DType a_type = DType::kF32;
  DType c_type = DType::kF32;
  bool bias = false;
  DType bias_type = DType::kF32;
  Activation activation = Activation::kNone;
  bool gated = false;
  bool row_weight = false;
  bool allow_bf16_activations = false;
  DataClass data = DataClass::kLattice;
  uint64_t seed = 1;

  friend bool operator==(const Case&, const Case&) = default;
};

/// Whether the data allow a bit-exact match with the reference.
bool IsLattice(DataClass data);

/// `gemm/u4/cpu/marlin_gemm_avx512/m17_n136_k288_g32/fp16_zint/bf16_bf16/silu/lattice/seed7`.
std::string CaseName(const Case& c);

/// The name without the kernel: cases with the same problem share data and reference.
std::string ProblemName(const Case& c);

/// The inverse of CaseName. Errors: kInvalidArgument naming the part that is not understood.
Result<Case> ParseCase(std::string_view name);

}  // namespace marlin::conformance
