#include "plan/step/router_errors.h"

#include <fmt/core.h>

namespace marlin {

Status NanChoiceBias(int64_t expert) {
  return Status(Code::kInvalidArgument, fmt::format("choice_bias: NaN at {}", expert));
}

Status BadLogit(bool is_nan, int64_t token, int64_t expert) {
  return Status(Code::kInvalidArgument, fmt::format("logits: {} at [{}, {}] (token, expert)",
                                                    is_nan ? "NaN" : "Inf", token, expert));
}

Status NoFiniteLogit(int64_t token, int64_t experts) {
  return Status(Code::kInvalidArgument,
                fmt::format("logits: expected a finite one per token, got -Inf for all {} experts "
                            "of token {}",
                            experts, token));
}

}  // namespace marlin
