// Runs a program and collects its output: how compilers are called.
#pragma once

#include <string>
#include <vector>

#include "metal_sim/status.h"

namespace metal_sim {

struct ChildOutput {
  int exit_code = 0;  ///< 128 + the signal where one ended it.
  std::string out;
  std::string error;
};

/// Runs `arguments[0]`, looked up in PATH, and waits for its end. Its input is empty. Errors: kIo,
/// naming the program, where it cannot be started.
Result<ChildOutput> RunChild(const std::vector<std::string>& arguments);

}  // namespace metal_sim
