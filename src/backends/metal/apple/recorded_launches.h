// Launches that were bound once and are encoded again and again.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backends/metal/apple/bound_launch.h"
#include "backends/metal/apple/device_memory.h"
#include "backends/metal/apple/open_commands.h"
#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

class RecordedLaunches {
 public:
  /// Binds launches, finds the barriers between them, and puts their parameters into a buffer.
  /// Precondition: all memory is the driver's. Errors: as Driver::Run.
  static Result<RecordedLaunches> Make(const std::vector<CheckedLaunches>& calls,
                                       const LaunchBinder& binder, DeviceMemory& memory);

  /// Errors: kDeviceLost.
  Status AppendTo(OpenCommands* open) const;

 private:
  /// A check, and how many launches come before it.
  struct Check {
    size_t launches = 0;
    ResultCheck check;
  };

  Status BindAll(const std::vector<CheckedLaunches>& calls, const LaunchBinder& binder,
                 UsedMemory* used);
  Status MoveParameters(DeviceMemory& memory, UsedMemory* used);

  std::vector<BoundLaunch> launches_;
  std::vector<Check> checks_;
  std::shared_ptr<const UsedMemory> used_;
};

}  // namespace marlin::metal
