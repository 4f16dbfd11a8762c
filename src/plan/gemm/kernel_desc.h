// A kernel's description and guarantees: one row of a backend's kernels.def.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "marlin/gemm.h"
#include "plan/gemm/gemm_desc.h"

namespace marlin {

/// The accuracy classes of docs/design/numerics.md.
enum class Grade : uint8_t {
  kExact,        ///< fp32 weight (scale * (value - zero) rounded once) times fp32 activation.
  kBf16Compute,  ///< The weight rounded once more to bf16; bf16 activations.
  kW4A8,         ///< Quantized activations: int8 per 32 k, e4m3 per row.
};
const char* GradeName(Grade grade);

/// The error bound that a kernel declares and the conformance program enforces. With the reference
/// C in double and S = sum_k |a_k w_k|:
///   |C' - C| <= gamma(depth) * S + (weight_unit + activation_unit) * S + u_out * |C| + eta
/// where gamma(d) = d u / (1 - d u), u = accumulate_unit, depth = ceil(k / lanes) + extra_depth. An
/// int8 kernel adds sum over its blocks of (amax(a) / 254) * sum |w| instead of activation_unit, an
/// e4m3 kernel activation_floor * amax(a) * sum |w| and the additions that the matrix unit does in
/// less than fp32: gamma(block_depth) * S with u = block_unit.
struct ErrorModel {
  double weight_unit = 0;
  double activation_unit = 0;
  double accumulate_unit = 0x1p-24;
  int64_t lanes = 1;
  int64_t extra_depth = 0;
  int64_t int8_block = 0;       ///< k per activation scale; 0 when activations are not int8.
  double activation_floor = 0;  ///< Relative to a row's amax; 0 when they are not e4m3.
  double block_unit = 0;
  int64_t block_depth = 0;  ///< Independent of k: after this many terms the sum is added in fp32.

  friend bool operator==(const ErrorModel&, const ErrorModel&) = default;
};

/// Whether a kernel can run a problem, and if not, why. The reason is formatted only when it is
/// read: a kernel that declines costs a selection no allocation.
struct Support {
  const char* refusal = nullptr;  ///< "takes up to {0} rows"; null: supported.
  int64_t number = 0;             ///< Replaces {0},
  std::string_view name = {};     ///< {1},
  std::string_view other = {};    ///< and {2}.

  bool ok() const { return refusal == nullptr; }
  /// Empty if supported.
  std::string reason() const;
};

/// Instruction-set levels. On a CPU each includes the earlier ones of its architecture.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAmx, kNeon, kCuda, kMetal };
const char* IsaName(Isa level);

/// Properties of a device that decide which kernels it can run.
struct DeviceProperties {
  Isa level = Isa::kScalar;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool fast_bf16_dots = false;  ///< vdpbf16ps does more operations per second than FMAs.
  int threads = 1;
  /// Whether a dense BLAS library is available; looked up on the first call. Null: this device has
  /// none.
  bool (*has_dense_library)() = nullptr;
  /// CUDA: the compute capability, times ten, that the device's code was compiled for.
  int cuda_code = 90;
  /// CUDA: whether that code has Hopper's own instructions (wgmma, for 9.0a).
  bool has_wgmma = true;
  /// Metal: whether matrix fragments have the element order that the kernels assume.
  bool known_fragments = true;
  /// Metal: whether the kernels were compiled with fast math, which lets the compiler reorder sums.
  bool fast_math = false;
};

/// The tiling to run a kernel with. Zeros leave it to the kernel.
struct KernelVariant {
  int width = 0;   ///< tile_m.
  int splits = 0;  ///< Split-K factor.

  bool automatic() const { return width == 0; }
  /// "128x2"; empty when left to the kernel.
  std::string ToString() const;
  friend bool operator==(const KernelVariant&, const KernelVariant&) = default;
};

/// How a kernel can be selected when no name is forced.
enum class Chosen : uint8_t {
  kByCost,         ///< By its backend's estimate (Backend::Cost), and by tuning tables.
  kByMeasurement,  ///< Only by a tuning-table entry that measured it as the fastest.
  kByName,         ///< Never: it runs only when GemmOptions::kernel names it.
};

/// One kernel, independent of the backend that runs it.
struct KernelDesc {
  const char* name;
  const char* op;
  Isa level;
  Grade grade;
  int tile_m;
  int tile_n;
  int tile_k;
  ErrorModel error;
  /// A flat list of early returns with reasons.
  Support (*supports)(const GemmDesc& desc, const DeviceProperties& device);
  Chosen chosen = Chosen::kByCost;
  /// Reads only weights prepared with PrepareOptions::marlin_w4.
  bool reads_marlin_w4 = false;
};

}  // namespace marlin
