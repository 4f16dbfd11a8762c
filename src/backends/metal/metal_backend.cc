#include "backends/metal/metal_backend.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/apple/apple_driver.h"
#include "backends/metal/decoder/metal_decoder.h"
#include "backends/metal/gemm/batch_launches.h"
#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/moe/metal_experts.h"
#include "backends/metal/plan/kernel_check.h"
#include "backends/metal/plan/kernel_table.h"
#include "backends/metal/plan/launch_plan.h"
#include "backends/metal/rows/element_launches.h"
#include "backends/metal/rows/transform_launches.h"
#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/recording_driver.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "base/environment.h"
#include "base/macros.h"
#include "base/thread_pool.h"
#include "plan/gemm/host_staging.h"
#include "plan/gemm/select.h"
#include "plan/gemm/transform_columns.h"

namespace marlin::metal {
namespace {

/// A GEMM split along m into parts that run in order, each short enough for a command buffer. The
/// matrices of a batch run together, as many as a command buffer takes.
class MetalGemm final : public PlannedGemm {
 public:
  MetalGemm(const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
            Driver& driver)
      : MetalGemm(kernel, desc, variant, PlanParts(kernel, desc, driver.Shape()), driver) {}

  Status Run(const GemmCall& call) const override {
    for (int64_t first = 0; first < call.desc.m; first += parts_.rows) {
      const int64_t rows = std::min(parts_.rows, call.desc.m - first);
      const LaunchPlan& plan = rows == parts_.rows ? parts_.whole : parts_.last;
      MARLIN_RETURN_IF_ERROR(driver_.Run(LaunchesOf(plan, RowsOf(call, first, rows)), call.stream));
    }
    return Status();
  }

  int64_t batch_workspace_bytes(int64_t count) const override {
    return workspace_bytes() * std::min(count, most_matrices_);
  }
  Status RunBatch(std::span<const GemmCall> calls, int64_t workspace_bytes) const override {
    const int64_t each = this->workspace_bytes();
    const int64_t most =
        each == 0 ? most_matrices_ : std::min(most_matrices_, workspace_bytes / each);
    for (size_t first = 0; first < calls.size();) {
      const size_t count =
          std::min(calls.size() - first, static_cast<size_t>(std::max<int64_t>(most, 1)));
      const std::span<const GemmCall> together = calls.subspan(first, count);
      MARLIN_RETURN_IF_ERROR(
          count == 1 ? Run(together[0])
                     : driver_.Run(BatchLaunchesOf(parts_.whole, together), together[0].stream));
      first += count;
    }
    return Status();
  }

 private:
  struct Parts {
    int64_t rows = 0;
    int64_t workspace_bytes = 0;
    LaunchPlan whole;
    LaunchPlan last;  ///< For the remainder: fewer rows may have other splits of k.
  };

  MetalGemm(const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
            const Parts& parts, Driver& driver)
      : PlannedGemm(kernel, variant, parts.workspace_bytes),
        parts_(parts),
        most_matrices_(parts.rows == desc.m ? MostMatricesOf(parts.whole, desc) : 1),
        driver_(driver) {}

  static Parts PlanParts(const KernelDesc& kernel, const GemmDesc& desc,
                         const DeviceShape& device) {
    Parts parts;
    parts.rows = RowsOfPart(desc);
    const auto plan = [&](int64_t rows) {
      GemmDesc part = desc;
      part.m = rows;
      LaunchPlan launch = PlanLaunch(kernel, part, device);
      parts.workspace_bytes = std::max(parts.workspace_bytes, PartialBytes(launch, part));
      return launch;
    };
    parts.whole = plan(parts.rows);
    const int64_t left = desc.m % parts.rows;
    if (left != 0) parts.last = plan(left);
    return parts;
  }

  const Parts parts_;
  const int64_t most_matrices_;  ///< In one launch of a batch.
  Driver& driver_;
};

class MetalBackend final : public Backend {
 public:
  explicit MetalBackend(std::unique_ptr<Driver> driver)
      : driver_(std::make_shared<RecordingDriver>(std::move(driver))),
        experts_(*driver_),
        decoder_(*driver_),
        pool_(0) {}

  DeviceInfo Info() const override {
    const DriverInfo driver = driver_->Info();
    DeviceInfo info;
    info.name = driver.name;
    info.backend = "metal";
    info.model = driver.model;
    info.features = driver.features;
    for (const KernelDesc& kernel : MetalKernels()) {
      GemmDesc any;
      any.m = 1;
      Support support = CheckSupport(kernel, any, Properties());
      // Some kernels take only integer formats, or only the formats that the others do not.
      for (const Format format : {Format::kU4, Format::kNf4}) {
        any.format = format;
        if (!support.ok()) support = CheckSupport(kernel, any, Properties());
      }
      info.kernels.push_back({kernel.name, kernel.op, support.ok(), support.reason(),
                              kernel.chosen == Chosen::kByName});
    }
    return info;
  }

  std::string Model() const override { return driver_->Info().model; }

  DeviceProperties Properties() const override { return PropertiesOf(driver_->Shape()); }

  std::span<const KernelDesc> Kernels() const override { return MetalKernels(); }

  bool KeepsSparse(const WeightsSpec& spec, PreparedFor /*use*/) const override {
    return GetFormatInfo(spec.format).bits == kernels::CodeBits(kernels::kSparse4);
  }

  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    if (options.marlin_w4) {
      return Status(Code::kUnsupported, "prepare: no Metal kernel reads marlin_w4");
    }
    MARLIN_ASSIGN_OR_RETURN(auto strips, PreparedStrips::Make(weights, this, driver_, pool_));
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(strips));
  }

  double Cost(const KernelDesc& kernel, const GemmDesc& desc) const override {
    return CostOf(kernel, desc);
  }

  Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& /*weights*/) const override {
    return {std::make_shared<const MetalGemm>(kernel, desc, variant, *driver_)};
  }

  Result<std::shared_ptr<const PlannedExperts>> PlanExperts(
      const ExpertsProblem& problem, const LayerExperts& experts,
      const SelectGemm& select) const override {
    return experts_.Plan(problem, experts, select);
  }

  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override {
    const auto& strips = static_cast<const PreparedStrips&>(weights);
    const WeightsSpec& spec = weights.spec;
    if (spec.k == 0 || spec.n == 0) return Status();
    const KernelLaunch launch = DequantizeLaunch(strips, expert, out);
    return driver_->Run({&launch, 1}, stream);
  }

  const DecoderBackend* decoder() const override { return &decoder_; }
  bool shares_memory() const override { return true; }

  Status AddRows(const AddRowsCall& call, void* stream) const override {
    if (call.tokens == 0 || call.width == 0) return Status();
    const KernelLaunch launch = AddRowsLaunch(call);
    return driver_->Run({&launch, 1}, stream);
  }

  Status TransformColumns(const TransformColumnsCall& call, void* stream) const override {
    if (!TakesTransform(call)) return Backend::TransformColumns(call, stream);
    if (call.from.ElementCount() == 0) return Status();
    const KernelLaunch launch = TransformLaunch(call);
    return driver_->Run({&launch, 1}, stream);
  }

  Result<void*> Allocate(int64_t bytes) const override { return driver_->Allocate(bytes); }
  void Free(void* data) const override { driver_->Free(data); }
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override {
    return CopyToDeviceAsync(device, host, bytes, nullptr);
  }
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override {
    return CopyToHostAsync(host, device, bytes, nullptr);
  }
  /// Memory is shared, so the host copies as soon as no work on the stream uses the memory.
  Status CopyToDeviceAsync(void* device, const void* host, int64_t bytes,
                           void* stream) const override {
    MARLIN_RETURN_IF_ERROR(driver_->WaitFor({device, bytes}, stream));
    std::memcpy(device, host, static_cast<size_t>(bytes));
    return Status();
  }
  Status CopyToHostAsync(void* host, const void* device, int64_t bytes,
                         void* stream) const override {
    MARLIN_RETURN_IF_ERROR(driver_->WaitFor({device, bytes}, stream));
    std::memcpy(host, device, static_cast<size_t>(bytes));
    return Status();
  }
  Status Synchronize(void* stream) const override { return driver_->Synchronize(stream); }
  bool calls_block() const override { return driver_->calls_block(); }
  bool records() const override { return true; }
  Result<std::unique_ptr<RecordedWork>> Record(
      const std::function<Status(void* stream)>& enqueue) const override {
    return driver_->Record(enqueue);
  }
  Driver& driver() const { return *driver_; }

 private:
  std::shared_ptr<RecordingDriver> driver_;
  ExpertPlanner experts_;
  MetalDecoder decoder_;
  mutable ThreadPool pool_;
};

}  // namespace

Result<std::unique_ptr<Backend>> OpenMetal(std::string_view name) {
  if (name == "metal-sim") {
    MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Driver> simulator, OpenSimulatedDriver());
    return MakeMetalBackend(std::move(simulator));
  }
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Driver> opened, OpenAppleDriver());
  Driver& driver = *opened;
  std::unique_ptr<Backend> backend = MakeMetalBackend(std::move(opened));
  const auto given = ReadEnvironment("METAL_MARLIN_METAL_SELF_TEST");
  const std::string tests = given ? given->value : "";
  if (tests == "all" || (tests.empty() && !driver.kernels_known_right())) {
    MARLIN_RETURN_IF_ERROR(CheckKernels(*backend).WithContext("metal"));
    driver.RememberRightKernels();
  }
  return backend;
}

Result<std::unique_ptr<Backend>> ListMetal() {
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Driver> driver, OpenAppleDriver({.for_list = true}));
  return MakeMetalBackend(std::move(driver));
}

std::unique_ptr<Backend> MakeMetalBackend(std::unique_ptr<Driver> driver) {
  return std::make_unique<MetalBackend>(std::move(driver));
}

Driver& DriverOf(const Backend& backend) {
  return static_cast<const MetalBackend&>(backend).driver();
}

}  // namespace marlin::metal
