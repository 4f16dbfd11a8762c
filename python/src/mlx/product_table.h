// The interface between _core and _mlx: weights as virtual classes that need no symbols of the
// library. _mlx is built separately because MLX's C++ ABI changes with every version.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/metal/moe/foreign_launches.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/tensor.h"

namespace marlin::python {

/// A GEMM on contiguous rows in memory that the device can access.
struct ProductCall {
  int64_t m = 0;
  DType type = DType::kF32;  ///< Type of rows and output.
  const void* rows = nullptr;
  void* out = nullptr;
  const void* bias = nullptr;  ///< May be null.
  DType bias_type = DType::kF32;
  int64_t expert = 0;
  /// [m], possibly wrong: of experts, the expert of each row; of other weights, columns to look up
  /// as rows [m, k] of `out`, without `rows`.
  const int32_t* ids = nullptr;
  std::string kernel;    ///< Forced kernel, Metal only; empty: selected.
  bool aligned = false;  ///< GemmDesc::aligned, Metal only.
};

/// Weights for the CPU.
class CpuProduct {
 public:
  virtual ~CpuProduct() = default;
  /// Computes on the calling thread and the device's threads. Returns an error message, or "".
  virtual std::string Run(const ProductCall& call) const = 0;
};

/// Weights for Apple GPUs, in memory that the caller owns.
class MetalProduct {
 public:
  virtual ~MetalProduct() = default;
  /// The launches of a GEMM whose m, n and k are not 0, in order. Addresses are null, except the
  /// one of a bias; buffer sizes are set. Returns an error message, or "".
  virtual std::string Plan(const ProductCall& call, const metal::DeviceShape& device,
                           std::vector<metal::KernelLaunch>* launches) const = 0;
  /// The launch that looks up columns as rows, of which the ids are right.
  virtual metal::KernelLaunch PlanLookUp(int64_t rows, DType type) const = 0;
  /// The source text of a kernel file (kernel_text.h).
  virtual std::string Text(const std::string& file) const = 0;
};

/// The experts of a layer for Apple GPUs, in memory that the caller owns: y = expert(x) by row.
class MetalExperts {
 public:
  virtual ~MetalExperts() = default;
  virtual int64_t image_bytes() const = 0;
  /// Writes weights and table for kernels that see the image at `address`; once.
  virtual void WriteImage(void* image, uint64_t address) = 0;
  virtual metal::ForeignExpertLaunches Plan(const metal::ForeignExpertsCall& call,
                                            const metal::DeviceShape& device) const = 0;
  virtual std::string Text(const std::string& file) const = 0;
};

/// Names of the capsules that hold a std::shared_ptr of these classes, the first two as const.
inline constexpr char kCpuCapsule[] = "metal_marlin.CpuProduct.2";
inline constexpr char kMetalCapsule[] = "metal_marlin.MetalProduct.2";
inline constexpr char kExpertsCapsule[] = "metal_marlin.MetalExperts.1";

}  // namespace marlin::python
