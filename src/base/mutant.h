// Seeded faults that prove that the conformance program notices them.
//
// MARLIN_MUTATE(i, original, mutated) is `original` in every ordinary build. A build with
// MARLIN_MUTANTS defined takes `mutated` when the environment variable MARLIN_MUTANT holds i; a
// build with MARLIN_MUTANT=i defined always takes it. Numbers are unique and without gaps:
// tests/conformance/run_mutants.py reads them from the sources.
#pragma once

#if defined(MARLIN_MUTANTS)

namespace marlin {
/// The number in the environment variable MARLIN_MUTANT, 0 when it is not set; defined by the
/// program that is built with mutants (tests/conformance/active_mutant.cc).
extern const int kActiveMutant;
}  // namespace marlin
#define MARLIN_MUTATE(i, original, mutated) \
  (::marlin::kActiveMutant == (i) ? (mutated) : (original))

#elif defined(MARLIN_MUTANT)

#define MARLIN_MUTATE(i, original, mutated) ((MARLIN_MUTANT) == (i) ? (mutated) : (original))

#else

#define MARLIN_MUTATE(i, original, mutated) (original)

#endif
