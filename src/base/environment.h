// The environment variables of the library; docs/howto/environment.md lists them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace marlin {

/// A variable that is set, perhaps to nothing.
struct EnvironmentVariable {
  std::string name;  ///< As it is set: messages about the value begin with it.
  std::string value;
};

/// The variable `name`, which begins with METAL_MARLIN_. If it is not set, the variable of the name
/// that earlier versions read, which begins with MARLIN_. None if neither is set.
std::optional<EnvironmentVariable> ReadEnvironment(const char* name);

/// A variable of host/variables.def.
struct KnownVariable {
  enum class User : uint8_t { kProduct, kBuilds };

  const char* name;
  User user;
};
std::span<const KnownVariable> KnownVariables();

/// The variables of this process with a prefix of this project (METAL_MARLIN, MARLIN_ or
/// METAL_SIM_), sorted by name.
std::vector<EnvironmentVariable> ListEnvironment();

}  // namespace marlin
