// The one place that knows how MLX's arrays hold Metal's buffers, which tests without a GPU replace.
#include "mlx/gpu_memory.h"

namespace marlin::python {

MTL::Buffer* BufferOf(const mlx::core::array& array) {
  return static_cast<MTL::Buffer*>(const_cast<void*>(array.buffer().ptr()));
}

}  // namespace marlin::python
