// Uses the installed library as the README shows it.
#include <marlin/marlin.h>

#include <cstdio>

int main() {
  const auto format = marlin::ParseFormat("fp4_e2m1");
  if (!format.ok()) {
    std::fprintf(stderr, "%s\n", format.status().message().c_str());
    return 1;
  }
  const auto values = marlin::FormatValues(*format);
  if (values.size() != 16 || values[7] != 6.0f) {
    std::fprintf(stderr, "fp4_e2m1: code 7 should be 6\n");
    return 1;
  }
  if (marlin::ParseFormat("fp5").status().code() != marlin::Code::kInvalidArgument) return 1;
  std::printf("%zu formats\n", marlin::AllFormats().size());
  return 0;
}
