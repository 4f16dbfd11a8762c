// Judging products and decoded weights of more than 2^31 elements: a small lattice problem repeated
// along m and n, so that every output must be, bit for bit, what the reference says about the small
// one.
#pragma once

#include <cstdint>

#include "plan/kernel_desc.h"
#include "problem.h"
#include "product_run.h"
#include "runner.h"

namespace marlin::conformance {

/// Every output [large_m, large_n] of a run.
CaseResult JudgeLargeProduct(const Problem& problem, const ProductRun& run, Grade grade);

/// Every weight [k, large_n] as dequantized, rows `stride` elements apart.
CaseResult JudgeLargeWeights(const Problem& problem, const std::byte* rows, int64_t stride);

}  // namespace marlin::conformance
