// JSON files next to the weights: accepted texts can be written and read again.
#include <nlohmann/json.hpp>
#include <string>

#include "base/json.h"
#include "fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = marlin::TextOf(data, size);
  const auto json = marlin::ParseJsonObject(text, "fuzz");
  if (!json.ok()) {
    marlin::CheckError(json.status());
    return 0;
  }
  const std::string dumped = marlin::DumpJson(*json);
  const auto again = marlin::ParseJsonObject(dumped, "again");
  MARLIN_FUZZ_CHECK(again.ok());
  MARLIN_FUZZ_CHECK(marlin::DumpJson(*again) == dumped);
  return 0;
}
