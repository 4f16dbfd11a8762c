// Conformance cases of the experts of an MoE layer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "case.h"
#include "marlin/moe.h"
#include "marlin/status.h"

namespace marlin::conformance {

/// The property that a case checks.
enum class ExpertsCheck : uint8_t {
  kCompare,         ///< The result against the reference.
  kRepeat,          ///< Repeated runs give one hash.
  kThreads,         ///< 1, 2, 3 and 5 threads: the same bits.
  kBatchInvariant,  ///< Some of the tokens without the others: the same bits.
  kPoison,          ///< A NaN and an Inf in x stay in the rows of their tokens.
  kBadId,           ///< An id that is no expert: an error that names token and selection.
};

/// Which experts the tokens select.
enum class Selection : uint8_t {
  kRandom,  ///< Different experts for every token.
  kOne,     ///< All selections are one expert, which has tokens * top_k rows.
  kFew,     ///< Random ones of the first top_k + 1 experts: the others are empty.
};

enum class GateKind : uint8_t { kNone, kRelu, kSilu, kGelu, kClamped };
enum class SharedKind : uint8_t { kNone, kPlain, kGated };

struct ExpertsCase {
  ExpertsCheck check = ExpertsCheck::kCompare;
  std::string backend = "cpu";
  std::string row;
  int64_t tokens = 1;
  int64_t experts = 4;
  int64_t top_k = 2;
  int64_t hidden = 96;
  int64_t inner = 64;
  std::string format = "mixed";  ///< A format's name, or "mixed": one per matrix.
  bool sparse = false;           ///< Matrices are 2:4 where the format and its offsets allow.
  bool varied = false;           ///< Group size, scale type and zero points differ by matrix.
  bool stacked = false;          ///< The matrices of all experts are one stack of weights.
  bool apart = false;            ///< Gate and up are two matrices.
  bool biased = false;           ///< Every matrix has a bias.
  GateKind gate = GateKind::kSilu;
  SharedKind shared = SharedKind::kNone;
  Selection selection = Selection::kRandom;
  bool missing = false;  ///< Every third expert is on another device.
  DType x_type = DType::kBf16;
  DType out_type = DType::kF32;
  bool padded = false;         ///< Rows of x and out are strided.
  bool misaligned = false;     ///< Base pointers are aligned to one element only.
  bool own_workspace = false;  ///< The device's own workspace instead of the caller's.
  Accuracy accuracy = Accuracy::kDefault;
  bool batch_invariant = false;
  bool allow_bf16 = true;
  DataClass data = DataClass::kLatticeSmall;  ///< Or kGaussian.
  uint64_t seed = 1;

  friend bool operator==(const ExpertsCase&, const ExpertsCase&) = default;
};

GateOptions GateOf(const ExpertsCase& c);

/// `experts/cpu/marlin_experts_avx2/tokens9/experts4/top2/hidden96/inner64/mixed/.../seed7`.
std::string CaseName(const ExpertsCase& c);

/// The inverse. Errors: kInvalidArgument naming the part that is not understood.
Result<ExpertsCase> ParseExpertsCase(std::string_view name);

/// Whether a name is one of a case of experts.
bool NamesExperts(std::string_view name);

/// The cases of a backend without their row. A pure function of the arguments.
std::vector<ExpertsCase> SelectExpertsCases(std::string_view backend, bool nightly);

}  // namespace marlin::conformance
