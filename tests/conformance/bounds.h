// Error bounds of outputs, from the error model that a kernel declares.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/gemm/kernel_desc.h"
#include "problem.h"

namespace marlin::conformance {

/// Error bounds of one output element, excluding the rounding to the output type.
struct Allowance {
  double hard = 0;     ///< The declared bound: beyond it is a bug.
  double tight = 0;    ///< The reach of independent rounding errors: 6 standard deviations.
  bool exact = false;  ///< Lattice: must equal the reference, rounded once, bit for bit.
};

/// Returns the allowances of all outputs [m, out_n] of a problem for one kernel.
std::vector<Allowance> Allowances(const Problem& problem, const ErrorModel& model, Grade grade);

/// Whether the kernel represents the activations and weights of a lattice problem exactly.
bool LatticeIsExactFor(const Problem& problem, const ErrorModel& model, Grade grade);

/// The verdict on one output.
struct Verdict {
  bool passed = false;
  double ratio = 0;  ///< Error over the tight bound; 0 where there is nothing to compare.
};

/// Compares `got`, an element of type c_type, with the unrounded reference.
Verdict Judge(double got, double expected, const Allowance& allowance, DType c_type,
              bool lenient_infinity);

}  // namespace marlin::conformance
