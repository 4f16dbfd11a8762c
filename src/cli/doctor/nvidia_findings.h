// Findings about NVIDIA GPUs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/cuda_backend.h"
#include "cli/doctor/finding.h"
#include "marlin/device.h"

namespace marlin::cli {

/// A device that this build runs.
struct OpenedGpu {
  DeviceInfo info;
  int64_t free_memory = 0;
};

/// Facts about the GPUs, the driver and the build; tests make them up.
struct NvidiaFacts {
  cuda::CudaBuild build;
  std::vector<OpenedGpu> devices;
  std::vector<Status> refused;         ///< The errors of devices that are there.
  std::string none;                    ///< Why there is no device, in the library's words.
  int64_t on_bus = 0;                  ///< GPUs that Linux finds on the PCI bus.
  std::string driver;                  ///< "580.95.05", the loaded kernel module's; or empty.
  std::optional<std::string> visible;  ///< CUDA_VISIBLE_DEVICES.
};

/// Looks at this machine. `root` is put before the paths of Linux's files.
NvidiaFacts FindNvidia(const std::string& root = "");

std::vector<Finding> NvidiaFindings(const NvidiaFacts& facts);

}  // namespace marlin::cli
