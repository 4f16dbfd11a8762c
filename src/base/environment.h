// The environment variables of the library; docs/howto/environment.md lists them.
#pragma once

#include <optional>
#include <string>

namespace marlin {

/// A variable that is set, perhaps to nothing.
struct EnvironmentVariable {
  std::string name;  ///< As it is set: messages about the value begin with it.
  std::string value;
};

/// The variable `name`, which begins with METAL_MARLIN_. If it is not set, the variable of the name
/// that earlier versions read, which begins with MARLIN_. None if neither is set.
std::optional<EnvironmentVariable> ReadEnvironment(const char* name);

}  // namespace marlin
