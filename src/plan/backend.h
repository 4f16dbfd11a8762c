// What a backend offers to the ops: prepared storage and the running of planned products.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"
#include "plan/gemm_desc.h"
#include "plan/kernel_desc.h"

namespace marlin {

class DecoderBackend;
struct LookUpWeightRowsCall;

/// Base of every backend's prepared weights.
struct PreparedWeights::Storage {
  WeightsSpec spec;
  const void* backend = nullptr;  ///< The Backend that made it; ops compare it.
  int64_t bytes = 0;
  bool tiled = false;      ///< Arranged for the matrix units; else only slow kernels read it.
  bool marlin_w4 = false;  ///< In the public layout of that name (PrepareOptions).
  bool fits_f16 = false;   ///< The tiles' weights keep their precision in fp16.
  bool fits_fp8 = false;   ///< The tiles' codes (minus their zeros) are e4m3 numbers.
  virtual ~Storage() = default;
};

/// The finishing steps of a product, on fp32 sums: bias, activation, gate, row weight, cast.
struct Epilogue {
  const void* bias = nullptr;  ///< [n], or null.
  DType bias_type = DType::kF32;
  Activation activation = Activation::kNone;
  bool gated = false;
  const float* row_weight = nullptr;  ///< [m], or null.
};

/// A validated, planned product. Strides count elements; columns are contiguous.
struct GemmCall {
  const KernelDesc* kernel = nullptr;
  KernelVariant variant;
  GemmDesc desc;
  const PreparedWeights::Storage* weights = nullptr;
  int64_t expert = 0;
  const void* a = nullptr;
  int64_t a_stride = 0;
  void* c = nullptr;
  int64_t c_stride = 0;
  Epilogue epilogue;
  void* workspace = nullptr;  ///< WorkspaceBytes(), 64-byte aligned, in the device's memory.
  void* stream = nullptr;
  bool overlap_previous = false;  ///< GemmOptions::overlap_previous.
};

/// One device's implementation. Thread-safe; const calls have no visible state.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceInfo Info() const = 0;
  /// Info().model, which is what tuning tables know a device by, without the rest.
  virtual std::string Model() const { return Info().model; }
  virtual DeviceFacts Facts() const = 0;
  virtual std::span<const KernelDesc> Kernels() const = 0;
  virtual Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const = 0;
  /// The variants of a kernel that can run a problem which it supports, first the one that it
  /// takes when that is left to it. None: there is one way to run it.
  virtual std::vector<KernelVariant> Variants(const KernelDesc& /*kernel*/,
                                              const GemmDesc& /*desc*/) const {
    return {};
  }
  /// Whether a variant can run a problem that the kernel supports.
  virtual bool CanRunAs(const KernelDesc& /*kernel*/, const GemmDesc& /*desc*/,
                        const KernelVariant& /*variant*/) const {
    return false;
  }
  /// Whether rules pass over a kernel that supports a problem, because a later one that does is
  /// expected to take less time.
  virtual bool PassesOver(const KernelDesc& /*kernel*/, const GemmDesc& /*desc*/) const {
    return false;
  }
  /// The measurements that the library brings, as tuning_table.h reads them; empty: none.
  virtual std::string_view ShippedTuning() const { return {}; }
  virtual int64_t WorkspaceBytes(const KernelDesc& kernel, const GemmDesc& desc,
                                 const KernelVariant& variant) const = 0;
  virtual Status Run(const GemmCall& call) const = 0;
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
