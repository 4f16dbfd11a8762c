// Validates a launch and works out its sizes, before anything is allocated or run. Must not know
// how it is run.
#pragma once

#include <cstdint>
#include <vector>

#include "metal_sim/device_memory.h"
#include "metal_sim/launch.h"

namespace metal_sim {

struct Grid {
  Triple threads{};       ///< [[threads_per_grid]]
  Triple threadgroups{};  ///< [[threadgroups_per_grid]]
  Triple threads_per_threadgroup{};
  uint32_t threadgroup_count = 0;
  uint32_t threads_per_threadgroup_count = 0;
};

/// Errors: kInvalidArgument (zeros, too many threads or threadgroups, also for the kernel).
Result<Grid> PlanGrid(const Kernel& kernel, const Launch& launch);

/// The buffers and values bound by `launch`, named by the kernel's arguments where the bindings
/// have no names. Errors: kInvalidArgument (an argument without a binding, no data, sizes out of
/// range), kUnsupported (bindings that overlap and are written).
Result<std::vector<BufferContent>> CollectBuffers(const Kernel& kernel, const Launch& launch);

/// Errors: kInvalidArgument (an argument whose length is not set, or is not a multiple of 16).
Status CheckThreadgroupMemory(const Kernel& kernel, const Launch& launch);

/// Errors: kInvalidArgument.
Status CheckOptions(const SimulationOptions& options);

}  // namespace metal_sim
