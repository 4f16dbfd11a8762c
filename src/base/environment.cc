#include "base/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

extern char** environ;  // NOLINT(readability-redundant-declaration): macOS declares it nowhere.

namespace marlin {

std::optional<EnvironmentVariable> ReadEnvironment(const char* name) {
  constexpr std::string_view kAdded = "METAL_";
  for (const char* const known : {name, name + kAdded.size()}) {
    if (const char* const value = std::getenv(known); value != nullptr) return {{known, value}};
  }
  return {};
}

std::span<const KnownVariable> KnownVariables() {
  static constexpr KnownVariable kVariables[] = {
#define MARLIN_VARIABLE(name, user) {#name, KnownVariable::User::user},
#include "base/host/variables.def"
#undef MARLIN_VARIABLE
  };
  return kVariables;
}

std::vector<EnvironmentVariable> ListEnvironment() {
  constexpr std::string_view kPrefixes[] = {"METAL_MARLIN", "MARLIN_", "METAL_SIM_"};
  std::vector<EnvironmentVariable> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t sign = text.find('=');
    if (sign == std::string_view::npos) continue;
    if (std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                    [&](std::string_view prefix) { return text.starts_with(prefix); })) {
      found.push_back({std::string(text.substr(0, sign)), std::string(text.substr(sign + 1))});
    }
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  return found;
}

}  // namespace marlin
