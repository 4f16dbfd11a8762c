#include "backends/metal/metal_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/apple/apple_driver.h"
#include "backends/metal/driver.h"
#include "backends/metal/kernel_check.h"
#include "backends/metal/kernel_table.h"
#include "backends/metal/launch_plan.h"
#include "backends/metal/prepared_strips.h"
#include "backends/metal/product_launches.h"
#include "backends/metal/row_parts.h"
#include "backends/metal/simulated_driver.h"
#include "base/macros.h"
#include "base/thread_pool.h"
#include "plan/decoder_calls.h"
#include "plan/indices.h"
#include "plan/select.h"

namespace marlin::metal {
namespace {

class MetalBackend final : public Backend {
 public:
  explicit MetalBackend(std::unique_ptr<Driver> driver) : driver_(std::move(driver)), pool_(0) {}

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
      Support support = CheckSupport(kernel, any, Facts());
      // Some kernels are for the formats of integers, or for what the others leave.
      for (const Format format : {Format::kU4, Format::kNf4}) {
        any.format = format;
        if (!support.ok()) support = CheckSupport(kernel, any, Facts());
      }
      info.kernels.push_back(
          {kernel.name, kernel.op, support.ok(), support.reason, kernel.chosen == Chosen::kByName});
    }
    return info;
  }

  std::string Model() const override { return driver_->Info().model; }

  DeviceFacts Facts() const override { return FactsOf(driver_->Shape()); }

  std::span<const KernelDesc> Kernels() const override { return MetalKernels(); }

  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    if (options.marlin_w4) {
      return Status(Code::kUnsupported, "prepare: no kernel of Metal reads marlin_w4");
    }
    MARLIN_ASSIGN_OR_RETURN(auto strips, PreparedStrips::Make(weights, this, driver_, pool_));
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(strips));
  }

  int64_t WorkspaceBytes(const KernelDesc& kernel, const GemmDesc& desc,
                         const KernelVariant& /*variant*/) const override {
    if (desc.m == 0 || desc.n == 0) return 0;
    // Of the parts, which run one after the other; the last one may have other splits.
    const int64_t rows = RowsOfPart(desc);
    GemmDesc part = desc;
    int64_t bytes = 0;
    for (const int64_t m : {rows, desc.m % rows == 0 ? rows : desc.m % rows}) {
      part.m = m;
      bytes = std::max(bytes, PartialBytes(PlanLaunch(kernel, part, driver_->Shape()), part));
    }
    return bytes;
  }

  Status Run(const GemmCall& call) const override {
    if (call.desc.m == 0 || call.desc.n == 0) return Status();
    const int64_t rows = RowsOfPart(call.desc);
    for (int64_t first = 0; first < call.desc.m; first += rows) {
      const GemmCall part = PartOf(call, first, std::min(rows, call.desc.m - first));
      MARLIN_RETURN_IF_ERROR(driver_->Run(ProductLaunches(part, driver_->Shape()), call.stream));
    }
    return Status();
  }

  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override {
    const auto& strips = static_cast<const PreparedStrips&>(weights);
    const WeightsSpec& spec = weights.spec;
    if (spec.k == 0 || spec.n == 0) return Status();
    const KernelLaunch launch = DequantizeLaunch(strips, expert, out);
    return driver_->Run({&launch, 1}, stream);
  }

  const DecoderBackend* decoder() const override { return nullptr; }
  bool shares_memory() const override { return true; }

  Status LookUpRows(const LookUpWeightRowsCall& call, void* stream) const override {
    // Products write no ids: the host wrote them, and is done.
    MARLIN_RETURN_IF_ERROR(CheckIndices("ids", call.ids, call.table.spec.n));
    const auto& strips = static_cast<const PreparedStrips&>(call.table);
    if (call.ids.dtype() == DType::kI32) {
      const KernelLaunch launch = LookUpLaunch(strips, call.ids, call.out);
      return driver_->Run({&launch, 1}, stream);
    }
    // The kernel reads i32; the copy lives until it is done.
    std::vector<int32_t> ids(static_cast<size_t>(call.ids.dim(0)));
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int32_t>(IndexAt(call.ids, static_cast<int64_t>(i)));
    }
    const TensorView narrow(ids.data(), DType::kI32, call.ids.shape());
    const KernelLaunch launch = LookUpLaunch(strips, narrow, call.out);
    MARLIN_RETURN_IF_ERROR(driver_->Run({&launch, 1}, stream));
    return driver_->Synchronize(stream);
  }

  Result<void*> Allocate(int64_t bytes) const override { return driver_->Allocate(bytes); }
  void Free(void* data) const override { driver_->Free(data); }
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override {
    MARLIN_RETURN_IF_ERROR(driver_->Synchronize(nullptr));
    std::memcpy(device, host, static_cast<size_t>(bytes));
    return Status();
  }
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override {
    MARLIN_RETURN_IF_ERROR(driver_->Synchronize(nullptr));
    std::memcpy(host, device, static_cast<size_t>(bytes));
    return Status();
  }
  Status Synchronize(void* stream) const override { return driver_->Synchronize(stream); }
  bool calls_block() const override { return driver_->calls_block(); }
  Driver& driver() const { return *driver_; }

 private:
  std::shared_ptr<Driver> driver_;
  mutable ThreadPool pool_;
};

}  // namespace

Result<std::unique_ptr<Backend>> OpenMetal(std::string_view name) {
  if (name == "metal-sim") {
    MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Driver> simulator, OpenSimulatedDriver());
    return MakeMetalBackend(std::move(simulator));
  }
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Driver> driver, OpenAppleDriver());
  std::unique_ptr<Backend> backend = MakeMetalBackend(std::move(driver));
  const char* const self_test = std::getenv("MARLIN_METAL_SELF_TEST");
  if (self_test == nullptr || *self_test == '\0') {
    MARLIN_RETURN_IF_ERROR(CheckKernels(*backend).WithContext("metal"));
  }
  return backend;
}

std::unique_ptr<Backend> MakeMetalBackend(std::unique_ptr<Driver> driver) {
  return std::make_unique<MetalBackend>(std::move(driver));
}

Driver& DriverOf(const Backend& backend) {
  return static_cast<const MetalBackend&>(backend).driver();
}

}  // namespace marlin::metal
