// What a kernel is and what it promises: one row of a backend's kernels.def.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "marlin/gemm.h"
#include "plan/gemm_desc.h"

namespace marlin {

/// The grades of docs/design/numerics.md.
enum class Grade : uint8_t {
  kExact,        ///< fp32 weight (scale * (value - zero) rounded once) times fp32 activation.
  kBf16Compute,  ///< The weight rounded once more to bf16; bf16 activations.
  kW4A8,         ///< Quantized activations (int8 per 32 k, e4m3 per row), scales on fp32 sums.
};
const char* GradeName(Grade grade);

/// The bound that a kernel declares and the conformance program enforces. With the reference C in
/// double and S = sum_k |a_k w_k|:
///   |C' - C| <= gamma(depth) * S + (weight_unit + activation_unit) * S + u_out * |C| + eta
/// where gamma(d) = d u / (1 - d u), u = accumulate_unit, depth = ceil(k / lanes) + extra_depth.
/// An int8 kernel adds sum over its blocks of (amax(a) / 254) * sum |w| instead of activation_unit,
/// an e4m3 kernel activation_floor * amax(a) * sum |w| and the additions that the matrix unit does
/// in less than fp32: gamma(block_depth) * S with u = block_unit.
struct ErrorModel {
  double weight_unit = 0;
  double activation_unit = 0;
  double accumulate_unit = 0x1p-24;
  int64_t lanes = 1;
  int64_t extra_depth = 0;
  int64_t int8_block = 0;       ///< k per activation scale; 0 when activations are not int8.
  double activation_floor = 0;  ///< Of a row's largest activation; 0 when they are not e4m3.
  double block_unit = 0;
  int64_t block_depth = 0;  ///< Whatever k is: then the sum is added in fp32.
};

/// Whether a kernel can run a problem, and why not. The reason is put into words only where
/// somebody reads it: a kernel that declines costs a selection no allocation.
struct Support {
  const char* refusal = nullptr;  ///< "takes up to {0} rows"; null: it can.
  int64_t number = 0;             ///< Stands in the place of {0},
  std::string_view name = {};     ///< of {1},
  std::string_view other = {};    ///< and of {2}.

  bool ok() const { return refusal == nullptr; }
  /// Empty where it can.
  std::string reason() const;
};

/// Instruction-set levels. Of the CPU each includes the ones before on its architecture.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAmx, kNeon, kSm90, kMetal };
const char* IsaName(Isa level);

/// Properties of a device that decide which kernels it can run.
struct DeviceProperties {
  Isa level = Isa::kScalar;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  int threads = 1;
  /// Whether a library of dense products is there, which is looked for when this is first called;
  /// null: there is none for this device.
  bool (*has_dense_library)() = nullptr;
  /// Metal: whether the elements of matrix fragments lie where the kernels want them.
  bool known_fragments = true;
  /// Metal: whether the kernels were compiled with fast math, which lets the compiler reorder sums.
  bool fast_math = false;
};

/// The tiling that a kernel is told to use. Zeros leave it to the kernel.
struct KernelVariant {
  int width = 0;   ///< tile_m.
  int splits = 0;  ///< Split-K factor.

  bool automatic() const { return width == 0; }
  /// "128x2"; empty when it is left to the kernel.
  std::string ToString() const;
  friend bool operator==(const KernelVariant&, const KernelVariant&) = default;
};

/// How a kernel comes to run where no name is forced.
enum class Chosen : uint8_t {
  kByCost,         ///< Its backend's estimate (Backend::Cost), and tuning tables.
  kByMeasurement,  ///< Only an entry of a tuning table that has measured it to be the fastest.
  kByName,         ///< Nothing: it runs where GemmOptions::kernel names it.
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
  Support (*supports)(const GemmDesc& desc, const DeviceProperties& facts);
  Chosen chosen = Chosen::kByCost;
  /// Takes weights of PrepareOptions::marlin_w4 and no others.
  bool reads_marlin_w4 = false;
};

}  // namespace marlin
