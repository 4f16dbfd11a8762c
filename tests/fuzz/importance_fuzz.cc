// Importance matrices of llama.cpp, in both forms: what is accepted is finite and complete.
#include <cmath>
#include <string>

#include "fuzz_target.h"
#include "marlin/importance.h"

using namespace marlin;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto importance = ImportanceMatrix::FromBytes(TextOf(data, size), "file");
  if (!importance.ok()) {
    CheckError(importance.status());
    return 0;
  }
  for (const auto& [name, inputs] : importance->inputs) {
    MARLIN_FUZZ_CHECK(inputs.experts > 0 && inputs.k > 0);
    MARLIN_FUZZ_CHECK(inputs.counts.size() == static_cast<size_t>(inputs.experts));
    MARLIN_FUZZ_CHECK(inputs.mean_squares.size() == static_cast<size_t>(inputs.experts * inputs.k));
    for (const float value : inputs.mean_squares) {
      MARLIN_FUZZ_CHECK(std::isfinite(value) && value >= 0.0f);
    }
  }
  return 0;
}
