// The only place that knows how MLX's arrays hold Metal's buffers: tests without a GPU replace it.
#include "mlx/gpu_memory.h"

namespace marlin::python {

MTL::Buffer* BufferOf(const mlx::core::array& array) {
  return static_cast<MTL::Buffer*>(const_cast<void*>(array.buffer().ptr()));
}

}  // namespace marlin::python
