// What _core hands to _mlx: weights that multiply, behind classes that need none of the library's
// symbols. _mlx is built apart because MLX's C++ interface is that of one version.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/metal/driver.h"
#include "marlin/tensor.h"

namespace marlin::python {

/// A product of contiguous rows in memory that the device reaches.
struct ProductCall {
  int64_t m = 0;
  DType type = DType::kF32;  ///< Of rows and output.
  const void* rows = nullptr;
  void* out = nullptr;
  const void* bias = nullptr;  ///< Or null.
  DType bias_type = DType::kF32;
  int64_t expert = 0;
  std::string kernel;  ///< Empty: the selection. Metal's alone.
};

/// Weights on the CPU.
class CpuProduct {
 public:
  virtual ~CpuProduct() = default;
  /// Computes, on the calling thread and the device's own. Returns what went wrong, or nothing.
  virtual std::string Run(const ProductCall& call) const = 0;
};

/// Weights for Apple GPUs, whose memory is somebody else's.
class MetalProduct {
 public:
  virtual ~MetalProduct() = default;
  /// The launches of a product whose m, n and k are not 0, one after the other; addresses are null,
  /// but for a bias, and the buffers' sizes are right. Returns what went wrong, or nothing.
  virtual std::string Plan(const ProductCall& call, const metal::DeviceShape& device,
                           std::vector<metal::KernelLaunch>* launches) const = 0;
  /// A file of kernels as one text (kernel_text.h).
  virtual std::string Text(const std::string& file) const = 0;
};

/// The names of the capsules that hold a std::shared_ptr<const ...> of those.
inline constexpr char kCpuCapsule[] = "metal_marlin.CpuProduct.1";
inline constexpr char kMetalCapsule[] = "metal_marlin.MetalProduct.1";

}  // namespace marlin::python
