// The instruction slots of launches, counted by the simulator.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "backends/metal/runtime/driver.h"
#include "marlin/status.h"
#include "metal_sim/launch.h"
#include "metal_sim/metal_program.h"

namespace marlin::metal {

/// Compiles each kernel again, specialised as a pipeline is. Not thread-safe.
class LaunchSlots {
 public:
  /// The slots of a launch over all threads. `described` is the launch as the simulator takes it,
  /// whose memory is left as it was. Errors: of the compiler.
  Result<int64_t> Count(const KernelLaunch& launch, metal_sim::Launch described);

 private:
  /// The program of one kernel with one combination of function constants.
  Result<metal_sim::MetalProgram*> ProgramOf(const KernelLaunch& launch);

  std::map<std::string, std::unique_ptr<metal_sim::MetalProgram>> programs_;
};

}  // namespace marlin::metal
