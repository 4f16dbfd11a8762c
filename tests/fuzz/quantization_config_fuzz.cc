// The description of quantized modules. Hardly any input has the right checksum, so it is corrected
// first to reach the code after the check.
#include <nlohmann/json.hpp>
#include <string>

#include "base/json.h"
#include "checkpoint/module_tensors.h"
#include "fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = marlin::TextOf(data, size);
  auto json = marlin::ParseJsonObject(text, "fuzz");
  if (!json.ok()) return 0;
  (*json)["checksum"] = marlin::QuantizationConfigChecksum(*json);
  const auto config = marlin::ParseQuantizationConfig(*json, "fuzz");
  if (!config.ok()) {
    marlin::CheckError(config.status());
    return 0;
  }
  for (const marlin::ModuleRecord& record : config->modules) {
    for (const marlin::ModuleTensor& tensor : marlin::ModuleTensors(record)) {
      MARLIN_FUZZ_CHECK(!tensor.name.empty());
      MARLIN_FUZZ_CHECK(tensor.bytes >= -1);
    }
  }
  const marlin::Json built = marlin::BuildQuantizationConfig(*config, json->at("recipe_document"));
  const auto again = marlin::ParseQuantizationConfig(built, "again");
  MARLIN_FUZZ_CHECK(again.ok());
  MARLIN_FUZZ_CHECK(again->modules.size() == config->modules.size());
  for (size_t i = 0; i < config->modules.size(); ++i) {
    MARLIN_FUZZ_CHECK(again->modules[i].module.name == config->modules[i].module.name);
    MARLIN_FUZZ_CHECK(again->modules[i].module.spec == config->modules[i].module.spec);
    MARLIN_FUZZ_CHECK(again->modules[i].layout == config->modules[i].layout);
  }
  return 0;
}
