// Embedding lookup on Apple GPUs; as product_gpu.cc.
#include <mlx/allocator.h>
#include <mlx/backend/metal/device.h>

#include <stdexcept>

#include "mlx/launches_gpu.h"
#include "mlx/look_up.h"
#include "mlx/types.h"

namespace marlin::python {

namespace mx = mlx::core;

void LookUp::eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) {
  if (weights_->metal == nullptr) {
    throw std::runtime_error("metal_marlin: these weights were prepared for the CPU");
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  const auto rows = static_cast<int64_t>(inputs.front().size());
  const auto text = [this](const std::string& file) { return weights_->metal->Text(file); };
  const std::vector<PlannedLaunch> planned =
      WithPipelines(mx::metal::device(stream().device),
                    {weights_->metal->PlanLookUp(rows, TypeOf(out.dtype()))}, text);
  auto& encoder = mx::metal::get_command_encoder(stream());
  Encode(encoder, planned.front(), [&](const metal::KernelBuffer& buffer) {
    if (buffer.index == MARLIN_BUFFER_OUTPUT) return encoder.set_output_array(out, buffer.index);
    const size_t input =
        buffer.index == MARLIN_BUFFER_INPUT ? 0 : 1 + static_cast<size_t>(buffer.index);
    encoder.set_input_array(inputs.at(input), buffer.index);
  });
}

}  // namespace marlin::python
