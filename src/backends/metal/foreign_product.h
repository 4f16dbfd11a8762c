// Products for frameworks that compile and run kernels themselves, as MLX does with
// mx.fast.metal_kernel: texts, arrays and numbers instead of launches.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/metal/kernel_body.h"
#include "backends/metal/prepared_strips.h"
#include "backends/metal/product_launches.h"
#include "marlin/gemm.h"

namespace marlin::metal {

/// Weights in the layout of Metal's kernels, in this machine's memory and without a device.
/// Errors: kInvalidArgument, kOutOfMemory.
Result<std::shared_ptr<PreparedStrips>> PrepareForeign(const QuantizedWeights& weights);

/// A product of `m` contiguous rows.
struct ForeignCall {
  int64_t m = 1;
  DType type = DType::kF32;  ///< Of the rows and of what comes out.
  int64_t expert = 0;
  bool has_bias = false;
  DType bias_type = DType::kF32;
  Activation activation = Activation::kNone;
  bool gated = false;
  Determinism determinism = Determinism::kDefault;
  bool aligned = false;  ///< GemmDesc::aligned.
  std::string kernel;    ///< Empty: the selection.
};

/// One kernel of a product.
struct ForeignKernel {
  std::string name;  ///< "marlin_gemm_fp4"; the kernels with it differ in `distinctions`.
  KernelBody body;
  /// Names and values of the function constants: what the header was made for.
  std::vector<std::pair<std::string, int>> distinctions;
  kernels::Parameters parameters{};
  std::array<int64_t, 3> grid{1, 1, 1};  ///< Threads in all.
  int64_t threads = 32;                  ///< Of a threadgroup, along the first dimension.
  bool partial = false;                  ///< Makes partial sums, float32, for the kernel behind it.
  int64_t output_bytes = 0;
  bool cleared = false;  ///< The output must hold zeros before.
};

/// The launches of a product whose m, n and k are not 0, one after the other. Of the addresses only
/// the bias's is set, and it says no more than that there is one. Errors: kInvalidArgument (a
/// name), kUnsupported (with the reasons of all kernels).
Result<GemmLaunches> ForeignLaunches(const PreparedStrips& weights, const ForeignCall& call,
                                     const DeviceShape& device);

/// A launch without its addresses. Errors: kInvalidArgument (no such kernel).
Result<ForeignKernel> DescribeForeign(const KernelLaunch& launch);

/// The same as kernels. An output has one writer: what ForeignLaunches clears with a launch of its
/// own is ForeignKernel::cleared here.
Result<std::vector<ForeignKernel>> PlanForeign(const PreparedStrips& weights,
                                               const ForeignCall& call, const DeviceShape& device);

}  // namespace marlin::metal
