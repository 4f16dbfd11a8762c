// Conformance cases of the router of an MoE layer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/moe.h"
#include "marlin/status.h"

namespace marlin::conformance {

enum class RouterData : uint8_t {
  kGaussian,
  kTies,       ///< Few different logits: the lower expert wins.
  kWide,       ///< Logits over several hundred: most scores underflow in fp32.
  kExcluded,   ///< Half of the logits are -Inf.
  kVanishing,  ///< The sum of the selected scores underflows to 0, or nearly.
  kHidden,     ///< The logits are the exact GEMM of integers: RouteHiddenStates.
  // Errors that name token and expert:
  kNan,
  kInf,
  kNoneFinite,
  kNanBias,
};

struct RouterCase {
  std::string backend = "cpu";
  std::string row;
  int64_t tokens = 1;
  int64_t experts = 8;
  int64_t top_k = 2;
  RouterOptions::Scoring scoring = RouterOptions::Scoring::kSoftmax;
  int64_t groups = 1;
  int64_t top_groups = 1;
  bool normalize = true;
  bool scaled = false;  ///< RouterOptions::scaling_factor is 2.5.
  bool bias = false;    ///< RouterOptions::choice_bias.
  bool padded = false;  ///< Strided rows.
  bool best = false;    ///< RouterOptions::best_of_group is 1.
  bool least = false;   ///< RouterOptions::least_sum is 0.5.
  RouterData data = RouterData::kGaussian;
  uint64_t seed = 1;

  friend bool operator==(const RouterCase&, const RouterCase&) = default;
};

/// Whether the case must end in an error.
bool ExpectsError(const RouterCase& c);

/// `router/cpu/marlin_router_avx2/tokens7/experts64/top8/sigmoid/groups8/of2/bias/gaussian/seed3`.
std::string CaseName(const RouterCase& c);

/// The inverse. Errors: kInvalidArgument naming the part that is not understood.
Result<RouterCase> ParseRouterCase(std::string_view name);

/// The cases of a backend without their row. A pure function of the arguments.
std::vector<RouterCase> SelectRouterCases(std::string_view backend, bool nightly);

}  // namespace marlin::conformance
