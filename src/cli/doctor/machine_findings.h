// Findings about the processor and the memory, and about Apple GPUs and their simulator.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/cpu/runtime/cpu_features.h"
#include "base/environment.h"
#include "cli/doctor/finding.h"

namespace marlin::cli {

/// The machine as this process sees it; tests make it up.
struct MachineFacts {
  cpu::CpuFeatures features;
  std::optional<EnvironmentVariable> forced;  ///< METAL_MARLIN_CPU.
  int threads = 1;                            ///< Processors that this process may use.
  int processors = 1;                         ///< Processors of the machine.
  std::optional<double> quota;                ///< Processors' worth of time in a control group.
  int64_t memory = 0;                         ///< Installed, or a control group's limit.
  std::optional<int64_t> free;
  std::optional<int64_t> address_space;  ///< The limit of `ulimit -v`.
};

MachineFacts FindMachine();

std::vector<Finding> MachineFindings(const MachineFacts& facts);

/// Apple's GPU, and the simulator of one.
std::vector<Finding> MetalFindings();

}  // namespace marlin::cli
