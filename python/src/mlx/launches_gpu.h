// Launches of the Metal backend on MLX's own encoder, which tracks lifetimes and hazards.
#pragma once

#include <mlx/backend/metal/device.h>

#include <functional>
#include <string>
#include <vector>

#include "backends/metal/runtime/driver.h"

namespace marlin::python {

/// The source text of a kernel file.
using TextOfFile = std::function<std::string(const std::string& file)>;

/// A launch with MLX's pipeline, which MLX keeps.
struct PlannedLaunch {
  metal::KernelLaunch launch;
  MTL::ComputePipelineState* pipeline = nullptr;
};

/// One library per file, one specialization per set of constants.
std::vector<PlannedLaunch> WithPipelines(mlx::core::metal::Device& device,
                                         std::vector<metal::KernelLaunch> launches,
                                         const TextOfFile& text);

/// Encodes a launch; `bind` sets every buffer of it.
void Encode(mlx::core::metal::CommandEncoder& encoder, const PlannedLaunch& planned,
            const std::function<void(const metal::KernelBuffer&)>& bind);

}  // namespace marlin::python
