// Files of routing: what is accepted is read again from its own text.
#include <string>
#include <vector>

#include "fuzz_target.h"
#include "marlin/routing.h"
#include "temporary_folder.h"

namespace {

using namespace marlin;

void CheckFrequencies(std::string_view text) {
  const auto frequencies = RoutingFrequencies::FromJson(text, "file");
  if (!frequencies.ok()) return CheckError(frequencies.status());
  const auto again = RoutingFrequencies::FromJson(frequencies->ToJson(), "file");
  MARLIN_FUZZ_CHECK(again.ok());
  MARLIN_FUZZ_CHECK(*again == *frequencies);
}

void CheckTrace(std::string_view text) {
  static const TemporaryFolder folder;
  const auto read = [](std::string_view from, std::vector<TokenRouting>* tokens) {
    folder.Write("trace", from);
    return ReadRoutingTrace(folder.Path("trace"), [tokens](const TokenRouting& token) -> Status {
      tokens->push_back(token);
      return {};
    });
  };
  std::vector<TokenRouting> tokens;
  const Status status = read(text, &tokens);
  if (!status.ok()) return CheckError(status);
  std::string written;
  for (const TokenRouting& token : tokens) written += RoutingTraceLine(token) + "\n";
  std::vector<TokenRouting> again;
  MARLIN_FUZZ_CHECK(read(written, &again).ok());
  MARLIN_FUZZ_CHECK(again == tokens);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  CheckFrequencies(TextOf(data, size));
  CheckTrace(TextOf(data, size));
  return 0;
}
