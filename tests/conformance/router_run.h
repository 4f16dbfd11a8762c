// Runs router cases on a device and compares them with the reference.
#pragma once

#include "router_case.h"
#include "runner.h"

namespace marlin::conformance {

/// The data of a router case.
struct RouterProblem {
  RouterCase c;
  std::vector<float> logits;  ///< [tokens, experts]
  std::vector<float> bias;    ///< [experts], or empty.
  // RouterData::kHidden: the logits are hidden x matrix.
  int64_t hidden = 0;
  std::vector<float> x;       ///< [tokens, hidden]
  std::vector<float> matrix;  ///< [hidden, experts]
};

RouterProblem MakeRouterProblem(const RouterCase& c);

/// The ids must be the reference's, the weights those of the reference rounded once; errors must
/// name token and expert.
CaseResult RunRouterCase(const Machine& machine, const Row& row, const RouterProblem& problem);

}  // namespace marlin::conformance
