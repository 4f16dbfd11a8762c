// User-written recipes: an accepted recipe is equal to the one read from its own text.
#include <string>

#include "fuzz_target.h"
#include "marlin/recipe.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = marlin::TextOf(data, size);
  const auto recipe = marlin::MixedPrecisionConfig::FromJson(text);
  if (!recipe.ok()) {
    marlin::CheckError(recipe.status());
    return 0;
  }
  (void)recipe->Choose("model.layers.0.self_attn.q_proj.weight", {64, 64});
  const std::string written = recipe->ToJson();
  const auto again = marlin::MixedPrecisionConfig::FromJson(written);
  MARLIN_FUZZ_CHECK(again.ok());
  MARLIN_FUZZ_CHECK(again->ToJson() == written);
  return 0;
}
