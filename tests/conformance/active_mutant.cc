// Selects the active seeded fault; linked into marlin_conformance_mutants only.
#include <cstdlib>

#include "base/mutant.h"

#if !defined(MARLIN_MUTANTS)
#error "this file belongs to builds with MARLIN_MUTANTS"
#endif

namespace marlin {

const int kActiveMutant = [] {
  const char* text = std::getenv("MARLIN_MUTANT");
  return text == nullptr ? 0 : std::atoi(text);
}();

}  // namespace marlin
