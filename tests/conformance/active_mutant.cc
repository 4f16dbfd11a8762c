// Selects the active fault; linked into marlin_conformance_mutants only.
#include "active_mutant.h"

#include <cstdlib>

namespace marlin {

const int kActiveMutant = [] {
  const char* text = std::getenv("MARLIN_MUTANT");
  return text == nullptr ? 0 : std::atoi(text);
}();

}  // namespace marlin
