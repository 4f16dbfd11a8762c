// Declares which fault of cpu_mutants.py is active. The build includes this header in front of
// every source of marlin_backends_cpu_mutants.
#pragma once

namespace marlin {

/// The number in the environment variable MARLIN_MUTANT; 0, which is no fault, where it is not set.
extern const int kActiveMutant;

}  // namespace marlin
