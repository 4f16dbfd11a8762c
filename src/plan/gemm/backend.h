// The backend interface that the operations use: prepared weights, plans, memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/internals.h"
#include "base/thread_pool.h"
#include "layout/join_columns.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"
#include "plan/gemm/gemm_desc.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin {

class Cholesky;
class DecoderBackend;
class HostStaging;
struct AddRowsCall;
struct ExpertsProblem;
struct KernelChoice;
struct LayerExperts;
struct TransformColumnsCall;
class PlannedExperts;
class PlannedGemm;
struct RowsCopy;

/// The selection of a kernel for a GEMM on a device.
using SelectGemm = std::function<Result<KernelChoice>(const GemmDesc&)>;

/// Cache of the plans of one set of prepared weights, keyed by problem and forced kernel: a layer
/// runs the same few problems over and over. Thread-safe; a hit allocates nothing.
class PlanCache {
 public:
  /// When full, the oldest entry is replaced.
  static constexpr size_t kCapacity = 64;

  PlanCache() = default;
  /// A copy starts empty: plans belong to one set of weights.
  PlanCache(const PlanCache& /*other*/) {}
  PlanCache& operator=(const PlanCache&) = delete;

  /// Null on a miss. `forced` is GemmOptions::kernel.
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
  const void* backend = nullptr;  ///< The Backend that made them; ops compare it.
  int64_t bytes = 0;
  WeightTraits traits;
  /// The arrays of the input transform of `spec`, [experts, k] in device memory, null where it has
  /// none. src/ops stores them once the backend has prepared the matrix, and transforms activations
  /// and results: no kernel reads them.
  struct Input {
    std::shared_ptr<const int32_t> permutation;
    std::shared_ptr<const float> scale;
  };
  mutable Input input;
  mutable PlanCache plans;
  virtual ~Storage() = default;
};

/// Prepared weights as bytes that can be written to a file and mapped back.
struct PreparedImage {
  WeightsSpec spec;
  std::span<const std::byte> data;    ///< 64-byte aligned.
  std::shared_ptr<const void> owner;  ///< Keeps data and input.
  /// The arrays of the input transform at any address, one after the other: the permutation, i32
  /// [experts, k], and the scales, f32 [experts, k]. Backends neither set nor read them.
  std::span<const std::byte> input = {};
};

/// Epilogue operands; the epilogue works on fp32 sums: bias, activation, gating, row weight, cast.
/// GemmDesc has the activation and whether the GEMM is gated.
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

/// Rows [first, first + count) of a call.
GemmCall RowsOf(const GemmCall& call, int64_t first, int64_t count);

/// A problem as far as the weights decide it; the rest has its defaults.
GemmDesc DescribeWeights(const PreparedWeights::Storage& weights);

/// One backend's plan of one GEMM: the kernel, its tiling, its workspace. Immutable and usable from
/// any thread; must not outlive the backend.
class PlannedGemm {
 public:
  PlannedGemm(const KernelDesc& kernel, const KernelVariant& variant, int64_t workspace_bytes)
      : kernel_(kernel), variant_(variant), workspace_bytes_(workspace_bytes) {}
  virtual ~PlannedGemm() = default;
  PlannedGemm(const PlannedGemm&) = delete;
  PlannedGemm& operator=(const PlannedGemm&) = delete;

  const KernelDesc& kernel() const { return kernel_; }
  /// The tiling, for kernels with several.
  const KernelVariant& variant() const { return variant_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }

  /// Runs the planned problem: call.desc is the planned one, m and n are not 0. Allocates nothing
  /// on success, takes no lock, and returns once the work is enqueued on the stream.
  virtual Status Run(const GemmCall& call) const = 0;

  /// The workspace with which RunBatch of `count` calls is fastest; workspace_bytes() are enough.
  virtual int64_t batch_workspace_bytes(int64_t /*count*/) const { return workspace_bytes_; }
  /// Run of every call, with the same bits. The calls share a workspace of `workspace_bytes`. They
  /// have the planned problem, consecutive experts of the same weights, and operands at a constant
  /// distance from call to call.
  virtual Status RunBatch(std::span<const GemmCall> calls, int64_t /*workspace_bytes*/) const {
    for (const GemmCall& call : calls) {
      if (Status status = Run(call); !status.ok()) return status;
    }
    return {};
  }

 private:
  const KernelDesc& kernel_;
  const KernelVariant variant_;
  const int64_t workspace_bytes_;
};

/// Work that was recorded once, and is launched as a whole: a CUDA graph. It reads and writes the
/// addresses of the recording.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
  /// Enqueues the work. One launch at a time. Errors: kDeviceLost.
  virtual Status Launch(void* stream) const = 0;
  /// The stream of the recording, whose workspaces the work uses.
  virtual void* stream() const = 0;
};

/// Marks in the work of a stream, and the times between them. Not thread-safe.
class StreamMarks {
 public:
  virtual ~StreamMarks() = default;
  /// Puts a mark after the work that is on the stream. Errors: kDeviceLost, kOutOfMemory.
  virtual Status Mark() = 0;
  /// Waits for the last mark; the seconds from each mark to the next. The next mark is a first one
  /// again. Errors: kDeviceLost.
  virtual Result<std::vector<double>> Take() = 0;
};

/// The use of prepared weights: products of the caller's (Prepare), or the steps of a model
/// (PrepareColumns), for which a device may have kernels that read fewer layouts.
enum class PreparedFor : uint8_t { kProducts, kModel };

/// One device's implementation. Thread-safe; const calls have no visible state.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceInfo Info() const = 0;
  /// Info().model without the rest; the key of tuning tables.
  virtual std::string Model() const { return Info().model; }
  virtual DeviceProperties Properties() const = 0;
  /// The host's threads on which its work runs; null if it does not run on them.
  virtual ThreadPool* host_threads() const { return nullptr; }
  virtual std::span<const KernelDesc> Kernels() const = 0;
  /// Whether kernels read 2:4 weights of this spec, codes of a format of 5 or 6 bits, and two
  /// levels of scales.
  virtual bool KeepsSparse(const WeightsSpec& /*spec*/, PreparedFor /*use*/) const { return false; }
  virtual bool KeepsOddWidths(Format /*format*/) const { return false; }
  virtual bool KeepsTwoLevels(const WeightsSpec& /*spec*/) const { return false; }
  /// The spec as which Prepare and PrepareColumns take weights: callers convert them first
  /// (layout/plain_weights.h).
  WeightsSpec TakenSpec(const WeightsSpec& spec, PreparedFor use) const;
  virtual Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const = 0;
  /// Prepares columns that can be joined (layout/join_columns.h) as one matrix. Codes of
  /// unquantized formats may be transposed and are validated here; everything else has been
  /// validated. Returns once the columns have been read; nothing may read the result before
  /// FinishPreparing. The default prepares a whole matrix in place and joins a copy of others.
  /// Errors: kNonFiniteInput for values that are NaN or Inf, and as for Prepare.
  virtual Result<std::shared_ptr<const PreparedWeights::Storage>> PrepareColumns(
      std::span<const WeightColumns> columns) const;
  /// Waits until everything that PrepareColumns returned can be read, on any stream. Errors:
  /// kDeviceLost.
  virtual Status FinishPreparing() const { return {}; }
  /// Names the layout of PreparedImage::data, with a version number; empty: this backend's prepared
  /// weights have no image.
  virtual std::string_view ImageLayout() const { return {}; }
  /// The image of weights that this backend prepared; its owner is the weights.
  virtual Result<PreparedImage> ImageOf(
      const std::shared_ptr<const PreparedWeights::Storage>& /*weights*/) const {
    return Status(Code::kUnsupported, Info().name + ": its prepared weights have no image");
  }
  /// Prepared weights backed by an image of this layout, whose values may be arbitrary.
  /// Precondition: a valid spec. Errors: kMalformedFile for data of the wrong size, kOutOfMemory.
  virtual Result<std::shared_ptr<const PreparedWeights::Storage>> FromImage(
      const PreparedImage& /*image*/) const {
    return Status(Code::kUnsupported, Info().name + ": cannot load images of prepared weights");
  }
  /// Estimated time of a kernel on a problem that it supports, in a backend-specific unit:
  /// selection only compares the kernels of one device. m, n, k > 0.
  virtual double Cost(const KernelDesc& kernel, const GemmDesc& desc) const = 0;
  /// The tilings in which a kernel can run a problem that it supports, its default first. Empty:
  /// the kernel has a single tiling.
  virtual std::vector<KernelVariant> Variants(const KernelDesc& /*kernel*/,
                                              const GemmDesc& /*desc*/) const {
    return {};
  }
  /// Whether a kernel can run a problem that it supports in a given tiling.
  virtual bool CanRunAs(const KernelDesc& /*kernel*/, const GemmDesc& /*desc*/,
                        const KernelVariant& /*variant*/) const {
    return false;
  }
  /// The tuning table shipped with the library, in the format of tuning_table.h; empty: none.
  virtual std::string_view ShippedTuning() const { return {}; }
  /// Plans a problem whose m and n are not 0 for a kernel that supports it. The plan is only valid
  /// for these weights. Errors: kDeviceLost, and the errors of a library that the kernel
  /// needs.
  virtual Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& weights) const = 0;
  /// Plans the experts of a layer, which outlive the plan; tokens and top_k are not 0. The plan
  /// keeps `select`. Null: this backend has no implementation of its own. Errors: kUnsupported for
  /// a GEMM without a kernel.
  virtual Result<std::shared_ptr<const PlannedExperts>> PlanExperts(
      const ExpertsProblem& /*problem*/, const LayerExperts& /*experts*/,
      const SelectGemm& /*select*/) const {
    return std::shared_ptr<const PlannedExperts>();
  }
  /// Whether PlanExperts has an implementation.
  virtual bool plans_experts() const { return false; }
  virtual Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                            const MutableTensorView& out, void* stream) const = 0;
  /// The decoder operations other than GEMMs; lives as long as the backend. Null: unsupported.
  virtual const DecoderBackend* decoder() const = 0;
  /// Whether device and host share memory, so that the host can stand in for decoder().
  virtual bool shares_memory() const { return false; }

  /// Memory for the kernels, aligned to 64 bytes or more. Errors: kOutOfMemory, kDeviceLost.
  virtual Result<void*> Allocate(int64_t bytes) const = 0;
  virtual void Free(void* data) const = 0;
  /// Synchronous copies. Errors: kDeviceLost.
  virtual Status CopyToDevice(void* device, const void* host, int64_t bytes) const = 0;
  virtual Status CopyToHost(void* host, const void* device, int64_t bytes) const = 0;
  /// Copies after the work on a stream; may return before the copy is done. By default they wait
  /// for the stream and copy. Errors: kDeviceLost.
  virtual Status CopyToDeviceAsync(void* device, const void* host, int64_t bytes,
                                   void* stream) const {
    const Status waited = Synchronize(stream);
    return waited.ok() ? CopyToDevice(device, host, bytes) : waited;
  }
  virtual Status CopyToHostAsync(void* host, const void* device, int64_t bytes,
                                 void* stream) const {
    const Status waited = Synchronize(stream);
    return waited.ok() ? CopyToHost(host, device, bytes) : waited;
  }
  /// The same copy of rows to the host. By default one copy per row.
  virtual Status CopyRowsToHostAsync(const RowsCopy& copy, void* stream) const;
  /// Host memory for these copies, page-locked if that lets them overlap other work. The default is
  /// ordinary memory, for backends whose copies are done when they return. Errors: kOutOfMemory.
  virtual Result<std::unique_ptr<HostStaging>> AllocateStaging(int64_t bytes) const;
  /// Whether the host may wait for work on a stream. Errors: kUnsupported while it is captured.
  virtual Status CheckHostMayWait(void* /*stream*/) const { return {}; }
  /// Most tokens of one pass through a model; bounds the memory of activations. Longer prompts take
  /// several passes, each of which reads all weights.
  virtual int64_t pass_tokens() const { return 512; }
  /// Free bytes of the device's own memory; 0: its memory is the host's, or this is unknown.
  virtual int64_t free_memory() const { return 0; }
  /// Whether its default GEMMs round fp32 activations to bf16 first, so that rows which only GEMMs
  /// read may as well be stored in bf16.
  virtual bool rounds_activations() const { return false; }
  /// Cholesky factorizations on the device; must not outlive the backend. Null: this device has
  /// none of its own. Errors: kUnsupported for a library that is not installed, kDeviceLost.
  virtual Result<std::unique_ptr<Cholesky>> MakeCholesky() const;
  /// Adds rows on the device. The default is for devices whose memory is the host's, which waits
  /// for the stream and adds. Errors: kDeviceLost.
  virtual Status AddRows(const AddRowsCall& call, void* stream) const;
  /// Applies an input transform on the device. The default is for devices whose memory is the
  /// host's, which waits for the stream and computes. Errors: kDeviceLost, kOutOfMemory.
  virtual Status TransformColumns(const TransformColumnsCall& call, void* stream) const;
  /// Does the work that `enqueue` puts on a stream, and records it; `enqueue` is called more than
  /// once, not after this call. The memory that the work uses must outlive the recording. Null: the
  /// work is done and was not recorded. Errors: kDeviceLost, and as for `enqueue`.
  virtual Result<std::unique_ptr<RecordedWork>> Record(
      const std::function<Status(void* stream)>& enqueue) const {
    const Status status = enqueue(nullptr);
    if (!status.ok()) return status;
    return std::unique_ptr<RecordedWork>();
  }
  /// Marks for a stream, which outlives them. With `holds` the device begins the work between the
  /// first mark and Take when all of it is there, or the host waits for it, so that the times do
  /// not include the host's. By default a mark waits for the stream and reads the host's clock.
  virtual Result<std::unique_ptr<StreamMarks>> MakeMarks(void* stream, bool holds) const;
  /// Whether Record makes later launches cheaper.
  virtual bool records() const { return false; }
  /// Errors: kDeviceLost.
  virtual Status Synchronize(void* stream) const = 0;
  /// Whether calls return only when their work is done. If not, a workspace must not be reused
  /// while another stream's work still uses it.
  virtual bool calls_block() const = 0;
};

}  // namespace marlin
