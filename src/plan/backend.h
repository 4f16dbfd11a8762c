// The interface of a backend to the operations: prepared weights, plans, memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layout/join_columns.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"
#include "plan/gemm_desc.h"
#include "plan/kernel_desc.h"

namespace marlin {

class DecoderBackend;
struct LookUpWeightRowsCall;

class PlannedGemm;

/// The plans of one set of prepared weights, by problem and forced kernel: a layer runs the same
/// few problems again and again. Thread-safe; a hit allocates nothing.
class PlanCache {
 public:
  /// The least recently added plan makes room for one more.
  static constexpr size_t kCapacity = 64;

  PlanCache() = default;
  /// Plans are for one set of weights: those of a copy are empty.
  PlanCache(const PlanCache& /*other*/) {}
  PlanCache& operator=(const PlanCache&) = delete;

  /// Null where there is none yet. `forced` is GemmOptions::kernel.
  std::shared_ptr<const PlannedGemm> Find(const GemmDesc& desc, std::string_view forced) const;
  void Add(const GemmDesc& desc, std::string_view forced, std::shared_ptr<const PlannedGemm> plan);

 private:
  struct Entry {
    GemmDesc desc;
    std::string forced;
    std::shared_ptr<const PlannedGemm> plan;
  };
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  size_t next_ = 0;  ///< The entry to replace once the cache is full.
};

/// Base of every backend's prepared weights.
struct PreparedWeights::Storage {
  WeightsSpec spec;
  const void* backend = nullptr;  ///< The Backend that made it; ops compare it.
  int64_t bytes = 0;
  WeightTraits traits;
  mutable PlanCache plans;
  virtual ~Storage() = default;
};

/// Prepared weights as bytes that can be written to a file and mapped back.
struct PreparedImage {
  WeightsSpec spec;
  std::span<const std::byte> data;    ///< 64-byte aligned.
  std::shared_ptr<const void> owner;  ///< Keeps data.
};

/// The operands of the epilogue, which works on fp32 sums: bias, activation, gate, row weight,
/// cast. GemmDesc says which activation and whether gated.
struct Epilogue {
  const void* bias = nullptr;  ///< [n], or null.
  DType bias_type = DType::kF32;
  const float* row_weight = nullptr;  ///< [m], or null.
};

/// The validated operands of one run of a plan. Strides count elements; columns are contiguous.
struct GemmCall {
  GemmDesc desc;
  const PreparedWeights::Storage* weights = nullptr;
  int64_t expert = 0;
  const void* a = nullptr;
  int64_t a_stride = 0;
  void* c = nullptr;
  int64_t c_stride = 0;
  Epilogue epilogue;
  void* workspace = nullptr;  ///< PlannedGemm::workspace_bytes, 64-byte aligned, on the device.
  void* stream = nullptr;
  bool overlap_previous = false;  ///< GemmOptions::overlap_previous.
};

/// One backend's plan of one GEMM: the kernel, its tiling, its workspace. Immutable, used from any
/// thread; lives as long as the backend at most.
class PlannedGemm {
 public:
  PlannedGemm(const KernelDesc& kernel, const KernelVariant& variant, int64_t workspace_bytes)
      : kernel_(kernel), variant_(variant), workspace_bytes_(workspace_bytes) {}
  virtual ~PlannedGemm() = default;
  PlannedGemm(const PlannedGemm&) = delete;
  PlannedGemm& operator=(const PlannedGemm&) = delete;

  const KernelDesc& kernel() const { return kernel_; }
  /// The tiling, where the kernel has several.
  const KernelVariant& variant() const { return variant_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }

  /// Runs the problem that was planned: call.desc is the planned one, m and n are not 0. Allocates
  /// nothing on success, takes no lock, and returns when the work is on the stream.
  virtual Status Run(const GemmCall& call) const = 0;

 private:
  const KernelDesc& kernel_;
  const KernelVariant variant_;
  const int64_t workspace_bytes_;
};

/// One device's implementation. Thread-safe; const calls have no visible state.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceInfo Info() const = 0;
  /// Info().model, which is what tuning tables know a device by, without the rest.
  virtual std::string Model() const { return Info().model; }
  virtual DeviceProperties Properties() const = 0;
  virtual std::span<const KernelDesc> Kernels() const = 0;
  virtual Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const = 0;
  /// Columns of weights that can be joined (layout/join_columns.h) as one matrix. Codes of
  /// unquantized formats may lie transposed and are validated here; all else has been. The default
  /// joins a copy and prepares that. Errors: kNonFiniteInput for numbers that are NaN or Inf, those
  /// of Prepare.
  virtual Result<std::shared_ptr<const PreparedWeights::Storage>> PrepareColumns(
      std::span<const WeightColumns> columns) const;
  /// Names the layout of PreparedImage::data, with a number that changes with it; empty: this
  /// backend's weights have no image.
  virtual std::string_view ImageLayout() const { return {}; }
  /// The image of weights that this backend prepared. The owner is theirs.
  virtual Result<PreparedImage> ImageOf(
      const std::shared_ptr<const PreparedWeights::Storage>& /*weights*/) const {
    return Status(Code::kUnsupported, Info().name + ": its prepared weights have no image");
  }
  /// Weights that lie in an image of this layout. Its values may be any. Precondition: a spec that
  /// weights can have. Errors: kMalformedFile for data of another size, kOutOfMemory.
  virtual Result<std::shared_ptr<const PreparedWeights::Storage>> FromImage(
      const PreparedImage& /*image*/) const {
    return Status(Code::kUnsupported, Info().name + ": reads no images of prepared weights");
  }
  /// The time that a kernel is expected to take for a problem which it supports, in a unit of the
  /// backend's own: selection compares a device's kernels with each other. m, n, k > 0.
  virtual double Cost(const KernelDesc& kernel, const GemmDesc& desc) const = 0;
  /// The tilings in which a kernel can run a problem that it supports, first the one that it takes
  /// when that is left to it. None: there is one way to run it.
  virtual std::vector<KernelVariant> Variants(const KernelDesc& /*kernel*/,
                                              const GemmDesc& /*desc*/) const {
    return {};
  }
  /// Whether a tiling can run a problem that the kernel supports.
  virtual bool CanRunAs(const KernelDesc& /*kernel*/, const GemmDesc& /*desc*/,
                        const KernelVariant& /*variant*/) const {
    return false;
  }
  /// The measurements that the library brings, as tuning_table.h reads them; empty: none.
  virtual std::string_view ShippedTuning() const { return {}; }
  /// Plans a problem whose m and n are not 0 for a kernel that supports it. The plan runs on these
  /// weights alone. Errors: kDeviceLost, and those of a library that the kernel needs.
  virtual Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& weights) const = 0;
  virtual Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                            const MutableTensorView& out, void* stream) const = 0;
  /// The operations beside the products; lives as long as the backend. Null: not there.
  virtual const DecoderBackend* decoder() const = 0;
  /// Whether the device's memory is the host's, so that the host may do what decoder() would.
  virtual bool shares_memory() const { return false; }
  /// Of a device that shares memory: out[i, k] = W[k, ids[i]], rounded once; DecoderBackend's.
  virtual Status LookUpRows(const LookUpWeightRowsCall& /*call*/, void* /*stream*/) const {
    return Status(Code::kUnsupported, Info().name + ": looks up no rows of prepared weights");
  }

  /// Memory that the kernels use, aligned to 64 bytes or more. Errors: kOutOfMemory, kDeviceLost.
  virtual Result<void*> Allocate(int64_t bytes) const = 0;
  virtual void Free(void* data) const = 0;
  /// Copy and wait. Errors: kDeviceLost.
  virtual Status CopyToDevice(void* device, const void* host, int64_t bytes) const = 0;
  virtual Status CopyToHost(void* host, const void* device, int64_t bytes) const = 0;
  /// Errors: kDeviceLost.
  virtual Status Synchronize(void* stream) const = 0;
  /// Whether a workspace may serve a call while another stream's work still uses it: false where
  /// calls return before their work is done.
  virtual bool calls_block() const = 0;
};

}  // namespace marlin
