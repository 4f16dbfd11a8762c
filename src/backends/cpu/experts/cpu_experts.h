// The experts of a layer on the CPU: one list of tasks over experts and columns for every step.
#pragma once

#include <memory>

#include "backends/cpu/runtime/cpu_features.h"
#include "base/thread_pool.h"
#include "plan/moe/experts.h"

namespace marlin::cpu {

/// The pool and the experts outlive the plan. Errors: kUnsupported for a GEMM without a kernel.
Result<std::shared_ptr<const PlannedExperts>> PlanCpuExperts(Isa level, ThreadPool& pool,
                                                             const ExpertsProblem& problem,
                                                             const LayerExperts& experts,
                                                             const SelectGemm& select);

}  // namespace marlin::cpu
