// Memory that kernels reach by its address, which MLX's encoder does not bind.
#pragma once

#include <mlx/array.h>
#include <mlx/backend/metal/device.h>

#include <cstdint>
#include <string>

namespace marlin::python {

/// The buffer of an array that has memory.
MTL::Buffer* BufferOf(const mlx::core::array& array);

/// An array's memory, resident in the command buffers that use it. Not copyable.
class ReachedMemory {
 public:
  /// Why there can be none; empty: there can.
  static std::string WhyNot();
  /// Precondition: WhyNot() is empty.
  explicit ReachedMemory(const mlx::core::array& array);
  ~ReachedMemory();
  ReachedMemory(const ReachedMemory&) = delete;
  ReachedMemory& operator=(const ReachedMemory&) = delete;

  uint64_t address() const { return address_; }
  /// Makes all such memory resident for the encoder's current command buffer.
  static void Use(const mlx::core::metal::CommandEncoder& encoder);

 private:
  MTL::Buffer* buffer_;  ///< The array keeps it.
  uint64_t address_;
};

}  // namespace marlin::python
