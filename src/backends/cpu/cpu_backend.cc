#include "backends/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "backends/cpu/experts/cpu_experts.h"
#include "backends/cpu/gemm/gemm_job.h"
#include "backends/cpu/gemm/kernel_table.h"
#include "backends/cpu/pack/prepared_panels.h"
#include "backends/cpu/runtime/cpu_cholesky.h"
#include "backends/cpu/runtime/cpu_features.h"
#include "backends/cpu/runtime/roofline.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/environment.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "plan/gemm/select.h"
#include "plan/gemm/transform_columns.h"

namespace marlin::cpu {
namespace {

/// Rounds one fp32 weight and stores it at out[row, column].
void StoreElement(const MutableTensorView& out, int64_t row, int64_t column, float value) {
  const int64_t i = row * out.stride(0) + column * out.stride(1);
  switch (out.dtype()) {
    case DType::kF16:
      out.As<uint16_t>()[i] = FloatToHalf(value);
      return;
    case DType::kBf16:
      out.As<uint16_t>()[i] = FloatToBf16(value);
      return;
    default:
      out.As<float>()[i] = value;
  }
}

/// A plan only fixes the workspace: tasks and blocking follow from the problem.
class CpuGemm final : public PlannedGemm {
 public:
  CpuGemm(const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
          ThreadPool& pool)
      : PlannedGemm(kernel, variant, GemmWorkspaceBytes(kernel, desc, pool.worker_count())),
        desc_(desc),
        pool_(pool) {}

  Status Run(const GemmCall& call) const override {
    RunGemm(kernel(), call, pool_);
    return Status();
  }

  int64_t batch_workspace_bytes(int64_t count) const override {
    return std::max(workspace_bytes(),
                    SharedRunBytes(kernel(), desc_, count, pool_.worker_count()));
  }
  Status RunBatch(std::span<const GemmCall> calls, int64_t workspace_bytes) const override {
    RunGemms(kernel(), calls, workspace_bytes, pool_);
    return Status();
  }

 private:
  const GemmDesc desc_;
  ThreadPool& pool_;
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(Isa level, const DeviceOptions& options)
      : level_(level),
        pool_(options.parallel_for
                  ? std::make_unique<ThreadPool>(options.parallel_for, options.threads)
                  : std::make_unique<ThreadPool>(options.threads)),
        decoder_(level, *pool_) {}

  DeviceInfo Info() const override {
    DeviceInfo info;
    info.name = "cpu";
    info.backend = "cpu";
    info.model = GetCpuFeatures().model;
    info.features = GetCpuFeatures().Names();
    info.threads = pool_->worker_count();
    for (const KernelDesc& kernel : CpuKernels()) {
      GemmDesc any;
      any.allow_bf16_activations = IsSparseGemv(kernel);
      any.weights.sparse = IsSparseGemv(kernel) || IsSparseGemm(kernel);
      any.accuracy = kernel.grade == Grade::kW4A8 ? Accuracy::kW4A8 : Accuracy::kDefault;
      const Support support = CheckSupport(kernel, any, Properties());
      info.kernels.push_back({kernel.name, kernel.op, support.ok(), support.reason()});
    }
    return info;
  }

  DeviceProperties Properties() const override {
    DeviceProperties device;
    device.level = level_;
    device.avx512_vnni = level_ >= Isa::kAvx512 && GetCpuFeatures().avx512_vnni;
    device.avx512_bf16 = level_ >= Isa::kAvx512 && GetCpuFeatures().avx512_bf16;
    device.fast_bf16_dots = device.avx512_bf16 && DotBeatsFma();
    device.threads = pool_->worker_count();
    return device;
  }

  ThreadPool* host_threads() const override { return pool_.get(); }

  std::span<const KernelDesc> Kernels() const override { return CpuKernels(); }

  bool KeepsSparse(const WeightsSpec& spec, PreparedFor /*use*/) const override {
    return HasSparsePanels(spec.format);
  }

  bool KeepsOddWidths(Format format) const override { return HasSplitPanels(format); }
  bool KeepsTwoLevels(const WeightsSpec& /*spec*/) const override { return true; }

  Result<std::unique_ptr<Cholesky>> MakeCholesky() const override {
    return std::unique_ptr<Cholesky>(std::make_unique<HostCholesky>(*pool_, CholeskyOf(level_)));
  }

  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    if (options.marlin_w4) {
      return Status(Code::kUnsupported, "prepare: no CPU kernel reads marlin_w4");
    }
    const WeightColumns all{&weights, 0, 1, weights.spec.n};
    return Panels({&all, 1}, /*validated=*/true);
  }

  Result<std::shared_ptr<const PreparedWeights::Storage>> PrepareColumns(
      std::span<const WeightColumns> columns) const override {
    return Panels(columns, /*validated=*/false);
  }

  // All levels share the layout of panels.h.
  std::string_view ImageLayout() const override { return "cpu_panels/1"; }
  Result<PreparedImage> ImageOf(
      const std::shared_ptr<const PreparedWeights::Storage>& weights) const override {
    const auto& panels = static_cast<const PreparedPanels&>(*weights);
    return PreparedImage{panels.spec, panels.image(), weights};
  }
  Result<std::shared_ptr<const PreparedWeights::Storage>> FromImage(
      const PreparedImage& image) const override {
    if (image.spec.sparsity == Sparsity::k24 && !HasSparsePanels(image.spec.format)) {
      return Status(Code::kMalformedFile, std::string("prepared weights: ") +
                                              std::string(FormatName(image.spec.format)) +
                                              " weights are dense in this layout, got 2:4");
    }
    MARLIN_ASSIGN_OR_RETURN(auto panels, PreparedPanels::FromImage(image, this));
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(panels));
  }

  double Cost(const KernelDesc& kernel, const GemmDesc& desc) const override {
    return CostOf(kernel, desc, Properties());
  }

  Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& /*weights*/) const override {
    return {std::make_shared<const CpuGemm>(kernel, desc, variant, *pool_)};
  }

  Result<std::shared_ptr<const PlannedExperts>> PlanExperts(
      const ExpertsProblem& problem, const LayerExperts& experts,
      const SelectGemm& select) const override {
    return PlanCpuExperts(level_, *pool_, problem, experts, select);
  }

  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* /*stream*/) const override {
    const PanelView view = static_cast<const PreparedPanels&>(weights).View(expert);
    const ExactKernels& kernels = ExactKernelsOf(level_);
    pool_->Run(view.blocks * view.chunks, [&](int64_t task, int) {
      const int64_t block = task / view.chunks;
      const int64_t chunk = task % view.chunks;
      float decoded[kBlockRows * kChunkK];
      kernels.decode_block(view, block, chunk, decoded);
      const int64_t columns = std::min<int64_t>(kBlockRows, weights.spec.n - block * kBlockRows);
      const int64_t rows = std::min<int64_t>(kChunkK, weights.spec.k - chunk * kChunkK);
      for (int64_t k = 0; k < rows; ++k) {
        for (int64_t n = 0; n < columns; ++n) {
          StoreElement(out, chunk * kChunkK + k, block * kBlockRows + n, decoded[n * kChunkK + k]);
        }
      }
    });
    return Status();
  }

  Status TransformColumns(const TransformColumnsCall& call, void* /*stream*/) const override {
    const int64_t rows = call.from.dim(0);
    // Fewer elements move in about the time that threads take to wake up.
    constexpr int64_t kWorthThreads = int64_t{1} << 16;
    if (call.from.ElementCount() < kWorthThreads) {
      return TransformRows(call, 0, rows);
    }
    // A task takes adjacent elements of a transposed view.
    constexpr int64_t kRowsOfTask = 16;
    std::atomic<bool> failed = false;
    pool_->Run(CeilDivide(rows, kRowsOfTask), [&](int64_t task, int) {
      const int64_t first = task * kRowsOfTask;
      const Status status = TransformRows(call, first, std::min(kRowsOfTask, rows - first));
      if (!status.ok()) failed = true;
    });
    return failed ? Status(Code::kOutOfMemory, "transform: cannot allocate") : Status();
  }

  const DecoderBackend* decoder() const override { return &decoder_; }

  Result<void*> Allocate(int64_t bytes) const override {
    MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(bytes));
    return static_cast<void*>(buffer.Release());
  }
  void Free(void* data) const override {
    AlignedBuffer::FreeReleased(static_cast<std::byte*>(data));
  }
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override {
    std::memcpy(device, host, static_cast<size_t>(bytes));
    return Status();
  }
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override {
    std::memcpy(host, device, static_cast<size_t>(bytes));
    return Status();
  }
  Status Synchronize(void* /*stream*/) const override { return Status(); }
  bool calls_block() const override { return true; }

 private:
  Result<std::shared_ptr<const PreparedWeights::Storage>> Panels(
      std::span<const WeightColumns> columns, bool validated) const {
    MARLIN_ASSIGN_OR_RETURN(auto panels, PreparedPanels::Make(columns, validated, this, *pool_));
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(panels));
  }

  Isa level_;
  std::unique_ptr<ThreadPool> pool_;
  CpuDecoder decoder_;
};

}  // namespace

Result<std::unique_ptr<Backend>> OpenCpu(const DeviceOptions& options) {
  Isa level = BestLevel(GetCpuFeatures());
  const auto forced = ReadEnvironment("METAL_MARLIN_CPU");
  if (forced && !forced->value.empty()) {
    MARLIN_ASSIGN_OR_RETURN(level, ParseIsa(forced->name, forced->value));
    MARLIN_RETURN_IF_ERROR(CheckLevel(level, GetCpuFeatures()).WithContext(forced->name));
  }
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(level, options));
}

}  // namespace marlin::cpu
