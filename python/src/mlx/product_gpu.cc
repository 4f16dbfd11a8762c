// The primitive on Apple GPUs: the Metal backend's kernels on MLX's own encoder, which tracks
// lifetimes and hazards. Compiles against MLX's Metal headers; tested only on stand-ins for MLX's
// encoder and the GPU (tests/mlx_primitive), never on a Mac.
#include <mlx/allocator.h>
#include <mlx/backend/metal/device.h>

#include <stdexcept>
#include <string>

#include "mlx/product.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

/// Index of a kernel's buffer among the primitive's inputs.
constexpr int kRows = 0;
constexpr int kParts = 1;  ///< Codes, scales, extras, table, in the order of their buffers.
static_assert(MARLIN_BUFFER_CODES == 0 && MARLIN_BUFFER_TABLE == 3);

/// MLX's pipeline of a launch: one library per file, one specialization per set of constants.
MTL::ComputePipelineState* PipelineOf(mx::metal::Device& device, const MetalProduct& product,
                                      const metal::KernelLaunch& launch) {
  const std::string file(launch.source);
  MTL::Library* const library =
      device.get_library("metal_marlin/" + file, [&] { return product.Text(file); });
  std::string hash = launch.function;
  mx::metal::MTLFCList constants;
  for (size_t i = 0; i < launch.constants.size(); ++i) {
    hash += "_" + std::to_string(launch.constants[i]);
    constants.emplace_back(&launch.constants[i], MTL::DataTypeInt, i);
  }
  return device.get_kernel(launch.function, library, hash, constants);
}

}  // namespace

const bool kHasMetal = true;

void Product::eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) {
  if (weights_->metal == nullptr) {
    throw std::runtime_error("metal_marlin: these weights were prepared for the CPU");
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  ProductCall call = Describe(inputs);
  if (has_bias_) call.bias = &call;  // Only marks that there is one; MLX has the address.
  std::vector<metal::KernelLaunch> launches;
  const std::string error = weights_->metal->Plan(call, weights_->shape, &launches);
  if (!error.empty()) throw std::runtime_error(error);

  mx::metal::Device& device = mx::metal::device(stream().device);
  mx::metal::CommandEncoder& encoder = mx::metal::get_command_encoder(stream());
  // Split-K partials are the only memory besides inputs and output.
  std::optional<mx::array> partials;
  const auto bind = [&](const metal::KernelBuffer& buffer, bool partial) {
    switch (buffer.index) {
      case MARLIN_BUFFER_OUTPUT:
        return encoder.set_output_array(partial ? *partials : out, buffer.index);
      case MARLIN_BUFFER_PARTIALS:
        return encoder.set_input_array(*partials, buffer.index);
      case MARLIN_BUFFER_INPUT:
        return encoder.set_input_array(inputs[kRows], buffer.index);
      case MARLIN_BUFFER_BIAS:
        return encoder.set_input_array(has_bias_ ? inputs.back() : inputs[kParts], buffer.index);
      case MARLIN_BUFFER_ROW_WEIGHT:
        return encoder.set_input_array(inputs[kParts], buffer.index);
      default:
        return encoder.set_input_array(inputs[static_cast<size_t>(kParts + buffer.index)],
                                       buffer.index);
    }
  };
  for (const metal::KernelLaunch& launch : launches) {
    const bool partial = launch.constants[MARLIN_CONSTANT_PARTIAL] != 0;
    for (const metal::KernelBuffer& buffer : launch.buffers) {
      if (!partial || partials || buffer.index != MARLIN_BUFFER_OUTPUT) continue;
      const auto count = static_cast<mx::ShapeElem>(buffer.bytes / int64_t{sizeof(float)});
      partials.emplace(mx::Shape{count}, mx::float32, nullptr, std::vector<mx::array>{});
      partials->set_data(mx::allocator::malloc(partials->nbytes()));
      encoder.add_temporary(*partials);
    }
    encoder.set_compute_pipeline_state(PipelineOf(device, *weights_->metal, launch));
    for (const metal::KernelBuffer& buffer : launch.buffers) bind(buffer, partial);
    encoder.set_bytes(launch.parameters, MARLIN_BUFFER_PARAMETERS);
    const auto& groups = launch.threadgroups;
    encoder.dispatch_threadgroups(MTL::Size(groups[0], groups[1], groups[2]),
                                  MTL::Size(launch.threads, 1, 1));
  }
}

}  // namespace marlin::python
