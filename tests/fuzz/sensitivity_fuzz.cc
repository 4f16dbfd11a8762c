// Files of sensitivities: what is accepted is read again from its own text, and a recipe that is
// chosen from it keeps to the bits.
#include <string>
#include <vector>

#include "fuzz_target.h"
#include "marlin/sensitivity.h"

using namespace marlin;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto sensitivity = Sensitivity::FromJson(TextOf(data, size), "file");
  if (!sensitivity.ok()) {
    CheckError(sensitivity.status());
    return 0;
  }
  const auto again = Sensitivity::FromJson(sensitivity->ToJson(), "file");
  MARLIN_FUZZ_CHECK(again.ok());
  MARLIN_FUZZ_CHECK(*again == *sensitivity);
  std::vector<TensorShape> tensors;
  for (const Sensitivity::Matrix& matrix : sensitivity->matrices) {
    tensors.push_back({matrix.name, {matrix.experts, matrix.n, matrix.k}});
  }
  const auto made = AssignFormats(*sensitivity, tensors, 4.0);
  if (made.ok()) {
    MARLIN_FUZZ_CHECK(made->bits_per_weight <= 4.0);
  } else {
    CheckError(made.status());
  }
  return 0;
}
