// One conformance case: everything that decides its data, in a name that reproduces it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "marlin/format.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin::conformance {

/// What is checked.
enum class Check : uint8_t {
  kGemm,            ///< One product against the reference.
  kDequantize,      ///< The device's dequantize against the reference.
  kBatchInvariant,  ///< Every row alone and in batches of 2..64: the same bits.
  kThreads,         ///< 1, 2, 3 and 5 threads: the same bits.
  kRowPermutation,  ///< Permuted rows of A give permuted rows of the output.
  kRepeat,          ///< Repeated runs give one hash.
  kStreams,         ///< The same product from 16 threads at once, each on its stream: one hash.
  kPeriodic,        ///< A small lattice problem repeated along m and n, and so must its output be.
  kChain,           ///< Products that read one another's output, begun before it is done.
};

enum class ZeroKind : uint8_t { kNone, kInteger, kFractional };

enum class DataClass : uint8_t {
  kLattice,      ///< Small integers, power-of-two scales: every partial sum is exact.
  kLatticeWide,  ///< The same with activations of up to 11 bits: two bf16 terms.
  kLatticeInt8,  ///< The same with activations that int8 blocks hold exactly.
  kGaussian,
  kHeavy,      ///< Outlier channels and scales over several orders of magnitude.
  kOneHot,     ///< One nonzero activation a row: finds permutations.
  kExtremes,   ///< Largest and smallest codes, large activations.
  kSubnormal,  ///< Scales in the subnormal range of their type.
  kNonFinite,  ///< A row with NaN, a row with Inf among Gaussian ones.
};

struct Case {
  Check check = Check::kGemm;
  Format format = Format::kFp4E2M1;
  std::string backend = "cpu";  ///< Of the kernels that the case is for: "cpu", "cuda", "metal".
  std::string kernel;           ///< A kernel's name, or "planned": the plan chooses.
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  int64_t group_size = 32;  ///< k for unquantized formats.
  int experts = 1;          ///< Stacked matrices; the last one is multiplied with.
  bool padded = false;      ///< Rows of A and the output lie apart.
  bool misaligned = false;  ///< Base pointers are aligned to one element only.
  ScaleType scale_type = ScaleType::kF16;
  ZeroKind zero = ZeroKind::kNone;
  bool weight_biases = false;
  bool user_codebook = false;
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

/// Whether the kernel must match the reference bit for bit as far as the data is concerned.
bool IsLattice(DataClass data);

/// `gemm/u4/cpu/marlin_gemm_avx512/m17_n136_k288_g32/fp16_zint/bf16_bf16/silu/lattice/seed7`.
std::string CaseName(const Case& c);

/// The name without the kernel: cases with the same problem share data and reference.
std::string ProblemName(const Case& c);

/// The inverse of CaseName. Errors: kInvalidArgument naming the part that is not understood.
Result<Case> ParseCase(std::string_view name);

}  // namespace marlin::conformance
