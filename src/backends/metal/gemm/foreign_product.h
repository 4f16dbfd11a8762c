// GEMMs for frameworks that compile and run kernels themselves, such as MLX through
// mx.fast.metal_kernel: source text, arrays and numbers instead of launches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/plan/kernel_body.h"
#include "marlin/gemm.h"

namespace marlin::metal {

/// Weights in the layout of the Metal kernels, in host memory and without a device; 2:4 weights,
/// codes of 5 and 6 bits and two levels of scales are made plain. Errors: kInvalidArgument,
/// kOutOfMemory.
Result<std::shared_ptr<PreparedStrips>> PrepareForeign(const QuantizedWeights& weights);

/// A GEMM of `m` contiguous rows of A.
struct ForeignCall {
  int64_t m = 1;
  DType type = DType::kF32;  ///< Type of A and of the output.
  int64_t expert = 0;
  bool has_bias = false;
  DType bias_type = DType::kF32;
  Activation activation = Activation::kNone;
  bool gated = false;
  Determinism determinism = Determinism::kDefault;
  bool aligned = false;  ///< GemmDesc::aligned.
  std::string kernel;    ///< Kernel to use; empty: selected by cost.
};

/// One kernel of a GEMM.
struct ForeignKernel {
  std::string name;  ///< "marlin_gemm_fp4"; kernels of one name differ in `distinctions`.
  KernelBody body;
  /// Names and values of the function constants that the header is specialised for.
  std::vector<std::pair<std::string, int>> distinctions;
  std::vector<std::byte> parameters;
  std::array<int64_t, 3> grid{1, 1, 1};  ///< Total threads per dimension.
  int64_t threads = 32;                  ///< Threads per threadgroup, along the first dimension.
  bool partial = false;                  ///< Writes float32 split-K partials for the next kernel.
  int64_t output_bytes = 0;
  bool cleared = false;  ///< The output must be zeroed before the launch.
};

/// The launches of a GEMM whose m, n and k are not 0, in order. The only address that is set is the
/// bias's, as a flag that there is a bias. Errors: kInvalidArgument (unknown kernel name),
/// kUnsupported (with the reasons of all kernels).
Result<GemmLaunches> ForeignLaunches(const PreparedStrips& weights, const ForeignCall& call,
                                     const DeviceShape& device);

/// The launch that looks up columns of one matrix, as rows [rows, k] of an element type, by i32 ids
/// that are in range. Without addresses.
KernelLaunch ForeignLookUp(const PreparedStrips& weights, int64_t rows, DType type);

/// Products of rows with matrices of a stack, which ids select.
struct ForeignGather {
  int64_t rows = 1;          ///< Rows of A, contiguous.
  int64_t ids_of_row = 1;    ///< Consecutive results of a row.
  DType type = DType::kF32;  ///< The type of A and of the output.
};

/// The launch that gathers, one GEMV per id. Without addresses.
KernelLaunch ForeignGatherLaunch(const PreparedStrips& weights, const ForeignGather& call);

/// A launch without its addresses. Errors: kInvalidArgument (no such kernel).
Result<ForeignKernel> DescribeForeign(const KernelLaunch& launch);

/// The same as kernels. Every output has a single writer: the launch of ForeignLaunches that zeroes
/// partials becomes ForeignKernel::cleared.
Result<std::vector<ForeignKernel>> PlanForeign(const PreparedStrips& weights,
                                               const ForeignCall& call, const DeviceShape& device);

}  // namespace marlin::metal
