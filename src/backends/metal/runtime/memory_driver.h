// A driver that allocates host memory and runs nothing, for weights whose kernels a framework runs.
#pragma once

#include <span>

#include "backends/metal/runtime/host_memory_driver.h"

namespace marlin::metal {

class MemoryDriver : public HostMemoryDriver {
 public:
  DriverInfo Info() const override { return {"memory", "memory", {}}; }
  DeviceShape Shape() const override { return {}; }
  Status Run(std::span<const KernelLaunch> /*launches*/, void* /*stream*/) override {
    return Status(Code::kUnsupported, "weights for other frameworks: this driver runs no kernels");
  }
};

}  // namespace marlin::metal
