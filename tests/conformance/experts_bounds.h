// Error bounds of the results of experts, from the error models of the kernels that may run them.
#pragma once

#include <vector>

#include "bounds.h"
#include "experts_problem.h"

namespace marlin::conformance {

struct KernelModel {
  ErrorModel error;
  Grade grade = Grade::kExact;

  friend bool operator==(const KernelModel&, const KernelModel&) = default;
};

/// The allowances of all outputs [tokens, hidden]. A plan of experts does not tell which kernel
/// runs which of its GEMMs, so every sum is allowed the largest error of the models.
std::vector<Allowance> ExpertsAllowances(const ExpertsData& data,
                                         const std::vector<KernelModel>& models);

}  // namespace marlin::conformance
