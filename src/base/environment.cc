#include "base/environment.h"

#include <cstdlib>
#include <string_view>

namespace marlin {

std::optional<EnvironmentVariable> ReadEnvironment(const char* name) {
  constexpr std::string_view kAdded = "METAL_";
  for (const char* const known : {name, name + kAdded.size()}) {
    if (const char* const value = std::getenv(known); value != nullptr) return {{known, value}};
  }
  return {};
}

}  // namespace marlin
