#include "mlx/launches_gpu.h"

#include <utility>

namespace marlin::python {
namespace {

namespace mx = mlx::core;

MTL::ComputePipelineState* PipelineOf(mx::metal::Device& device, const metal::KernelLaunch& launch,
                                      const TextOfFile& text) {
  const std::string file(launch.source);
  const std::string function(launch.function);
  MTL::Library* const library =
      device.get_library("metal_marlin/" + file, [&] { return text(file); });
  std::string hash = function;
  mx::metal::MTLFCList constants;
  for (size_t i = 0; i < launch.constants.size(); ++i) {
    hash += "_" + std::to_string(launch.constants[i]);
    constants.emplace_back(&launch.constants[i], MTL::DataTypeInt, i);
  }
  return device.get_kernel(function, library, hash, constants);
}

}  // namespace

std::vector<PlannedLaunch> WithPipelines(mx::metal::Device& device,
                                         std::vector<metal::KernelLaunch> launches,
                                         const TextOfFile& text) {
  std::vector<PlannedLaunch> planned;
  planned.reserve(launches.size());
  for (metal::KernelLaunch& launch : launches) {
    MTL::ComputePipelineState* const pipeline = PipelineOf(device, launch, text);
    planned.push_back({std::move(launch), pipeline});
  }
  return planned;
}

void Encode(mx::metal::CommandEncoder& encoder, const PlannedLaunch& planned,
            const std::function<void(const metal::KernelBuffer&)>& bind) {
  const metal::KernelLaunch& launch = planned.launch;
  encoder.set_compute_pipeline_state(planned.pipeline);
  for (const metal::KernelBuffer& buffer : launch.buffers) bind(buffer);
  const std::span<const std::byte> parameters = metal::ParameterBytes(launch);
  encoder.set_bytes(parameters.data(), static_cast<int>(parameters.size()),
                    MARLIN_BUFFER_PARAMETERS);
  const auto& groups = launch.threadgroups;
  encoder.dispatch_threadgroups(MTL::Size(groups[0], groups[1], groups[2]),
                                MTL::Size(launch.threads, 1, 1));
}

}  // namespace marlin::python
