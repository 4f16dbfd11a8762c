#include "backends/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <charconv>
#include <optional>
#include <string>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/decoder/cuda_decoder.h"
#include "backends/cuda/gemm/cublas/cublas_launch.h"
#include "backends/cuda/gemm/gemv/gemv_launch.h"
#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/libraries/cublas_library.h"
#include "backends/cuda/moe/experts/cuda_experts.h"
#include "backends/cuda/plan/device_refusal.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/plan/kernel_table.h"
#include "backends/cuda/plan/sparse_setting.h"
#include "backends/cuda/rows/add_rows.h"
#include "backends/cuda/rows/transform_columns.h"
#include "backends/cuda/runtime/device_cholesky.h"
#include "backends/cuda/runtime/device_code.h"
#include "backends/cuda/runtime/device_memory.h"
#include "backends/cuda/runtime/event_marks.h"
#include "backends/cuda/runtime/pinned_staging.h"
#include "backends/cuda/runtime/recorded_graph.h"
#include "backends/cuda/runtime/value_errors.h"
#include "backends/cuda/tuning/shipped_tuning.h"
#include "backends/cuda/weights/dequantize_prepared.h"
#include "backends/cuda/weights/prepared_tiles.h"
#include "backends/cuda/weights/weight_upload.h"
#include "base/environment.h"
#include "base/macros.h"
#include "marlin/format.h"
#include "plan/gemm/transform_columns.h"

namespace marlin::cuda {

// Declares Make<Family> for every row; the family's folder defines it.
#define MARLIN_CUDA_KERNEL(name, family, ...) \
  Result<std::shared_ptr<const PlannedGemm>> Make##family(const PlanRequest& request);
#define MARLIN_CUDA_W4_KERNEL(...) MARLIN_CUDA_KERNEL(__VA_ARGS__)
#include "backends/cuda/plan/kernels.def"
#undef MARLIN_CUDA_KERNEL

namespace {

/// Make<Family> of each row, in the order of CudaKernels().
constexpr MakeGemm kMakers[] = {
#define MARLIN_CUDA_KERNEL(name, family, ...) &Make##family,
#include "backends/cuda/plan/kernels.def"
#undef MARLIN_CUDA_W4_KERNEL
#undef MARLIN_CUDA_KERNEL
};

/// Whether an environment variable is set to 0.
bool IsZero(const char* name) {
  const auto given = ReadEnvironment(name);
  return given && given->value == "0";
}

DeviceRates RatesOf(int device) {
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) cudaGetLastError();
    return value;
  };
  DeviceRates rates;
  rates.megahertz = attribute(cudaDevAttrClockRate) / 1e3;
  rates.gigabytes = GigabytesOf(attribute(cudaDevAttrMemoryClockRate),
                                attribute(cudaDevAttrGlobalMemoryBusWidth));
  rates.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  return rates;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(int index, const cudaDeviceProp& properties)
      : device_(std::make_shared<DeviceHandle>()), properties_(properties) {
    device_->index = index;
    shape_.multiprocessors = properties.multiProcessorCount;
    shape_.rates = RatesOf(index);
    costs_ = CostsOf(properties.name, shape_.rates, shape_.multiprocessors);
    shape_.costs = &costs_;
    const DeviceScope scope(index);
    shape_.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
    if (MostShared(&shape_.shared_bytes) != cudaSuccess) cudaGetLastError();
    shape_.code = DeviceCode();
    model_ = TunedName(properties.name, properties.major * 10 + properties.minor, shape_.code);
    shape_.has_wgmma = IsHopperBuilt() && properties.major == 9 && shape_.code == 90;
    if (!shape_.has_tma()) return;
    for (int blocks = 1; blocks <= kMaxSplits; ++blocks) {
      const int found = CountClusters(blocks, shape_);
      shape_.clusters[blocks - 1] = found > 0 ? found : shape_.multiprocessors / blocks;
    }
  }

  /// Allocates what kernels share; call it before the first Plan.
  Status MakeShared() {
    MARLIN_ASSIGN_OR_RETURN(upload_, WeightUpload::Make(device_));
    MARLIN_ASSIGN_OR_RETURN(scratch_, SplitKScratch::Make(device_));
    MARLIN_ASSIGN_OR_RETURN(value_errors_, ValueErrors::Make(device_));
    // Comparisons with the step's operations one by one turn it off.
    const bool persistent = !IsZero("METAL_MARLIN_CUDA_PERSISTENT");
    decoder_.emplace(device_, *value_errors_, *scratch_, shape_, persistent);
    MARLIN_RETURN_IF_ERROR(decoder_->Load());
    context_.emplace(LaunchContext{*device_, shape_, *scratch_, cublas_});
    return Status();
  }

  DeviceInfo Info() const override {
    DeviceInfo info;
    info.name = "cuda:" + std::to_string(device_->index);
    info.backend = "cuda";
    info.model = model_;
    info.features = {"sm_" + std::to_string(properties_.major) + std::to_string(properties_.minor),
                     "code of " + CapabilityName(shape_.code),
                     std::to_string(properties_.multiProcessorCount) + " multiprocessors",
                     std::to_string(properties_.totalGlobalMem >> 30) + " GiB"};
    for (const KernelDesc& kernel : CudaKernels()) {
      const Support support = CheckAvailable(kernel, Properties());
      info.kernels.push_back({kernel.name, kernel.op, support.ok(), support.reason(),
                              kernel.chosen == Chosen::kByName});
    }
    return info;
  }

  /// Avoids Info(), which queries every kernel: marlin_gemm_cublas would search for cuBLAS.
  std::string Model() const override { return model_; }

  DeviceProperties Properties() const override {
    DeviceProperties device;
    device.level = Isa::kCuda;
    device.has_dense_library = HasCublas;
    device.cuda_code = shape_.code;
    device.has_wgmma = shape_.has_wgmma;
    return device;
  }

  std::span<const KernelDesc> Kernels() const override { return CudaKernels(); }

  bool KeepsSparse(const WeightsSpec& spec, PreparedFor use) const override {
    return KeepsSparseTiles(spec.format, use, sparse_setting_);
  }

  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const WeightColumns all{&weights, 0, 1, weights.spec.n};
    MARLIN_ASSIGN_OR_RETURN(auto prepared, PreparedTiles::Make({&all, 1}, options, this, *upload_));
    MARLIN_RETURN_IF_ERROR(upload_->Finish());
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(prepared));
  }
  Result<std::shared_ptr<const PreparedWeights::Storage>> PrepareColumns(
      std::span<const WeightColumns> columns) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    MARLIN_ASSIGN_OR_RETURN(auto prepared, PreparedTiles::Make(columns, {}, this, *upload_));
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(prepared));
  }
  Status FinishPreparing() const override { return upload_->Finish(); }

  std::vector<KernelVariant> Variants(const KernelDesc& kernel,
                                      const GemmDesc& desc) const override {
    return VariantsOf(kernel, desc, shape_);
  }
  bool CanRunAs(const KernelDesc& kernel, const GemmDesc& desc,
                const KernelVariant& variant) const override {
    return cuda::CanRunAs(kernel, desc, shape_, variant);
  }
  double Cost(const KernelDesc& kernel, const GemmDesc& desc) const override {
    return FamilyOf(kernel).microseconds(desc, shape_);
  }
  /// Measured with Hopper's kernels: no guide for other code on such a device.
  std::string_view ShippedTuning() const override {
    return shape_.has_wgmma ? cuda::ShippedTuning() : std::string_view();
  }

  Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& weights) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    const PlanRequest request = {kernel, desc, variant, static_cast<const PreparedTiles&>(weights),
                                 *context_};
    // With k = 0 all sums are zero: the exact kernel stores them for families that need k > 0.
    if (desc.k == 0 && !FamilyOf(kernel).takes_empty_k) return MakeExact(request);
    return kMakers[&kernel - CudaKernels().data()](request);
  }

  Result<std::shared_ptr<const PlannedExperts>> PlanExperts(
      const ExpertsProblem& problem, const LayerExperts& experts,
      const SelectGemm& /*select*/) const override {
    return PlanCudaExperts(*context_, device_, *value_errors_, problem, experts);
  }

  bool plans_experts() const override { return true; }

  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    const auto& prepared = static_cast<const PreparedTiles&>(weights);
    const DenseView dense = {out.data(), ElementOf(out.dtype()), out.stride(0), out.stride(1)};
    return device_->errors.Check(
        LaunchDequantizePrepared(prepared, expert, dense, static_cast<cudaStream_t>(stream)),
        "marlin_dequantize");
  }

  const DecoderBackend* decoder() const override { return &*decoder_; }

  Result<std::unique_ptr<Cholesky>> MakeCholesky() const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    return MakeDeviceCholesky(device_);
  }

  Result<void*> Allocate(int64_t bytes) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device_, bytes));
    return memory.Release();
  }
  void Free(void* data) const override {
    const DeviceScope scope(device_->index);
    cudaFree(data);
  }
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override {
    return Copy(device, host, bytes, cudaMemcpyHostToDevice);
  }
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override {
    return Copy(host, device, bytes, cudaMemcpyDeviceToHost);
  }
  Status CopyToDeviceAsync(void* device, const void* host, int64_t bytes,
                           void* stream) const override {
    return CopyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream);
  }
  Status CopyToHostAsync(void* host, const void* device, int64_t bytes,
                         void* stream) const override {
    return CopyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream);
  }
  Status CopyRowsToHostAsync(const RowsCopy& copy, void* stream) const override {
    if (copy.rows == 1 || copy.stride_bytes == copy.row_bytes) {
      return CopyToHostAsync(copy.host, copy.device, copy.rows * copy.row_bytes, stream);
    }
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    const auto row_bytes = static_cast<size_t>(copy.row_bytes);
    return device_->errors.Check(
        cudaMemcpy2DAsync(copy.host, row_bytes, copy.device, static_cast<size_t>(copy.stride_bytes),
                          row_bytes, static_cast<size_t>(copy.rows), cudaMemcpyDeviceToHost,
                          static_cast<cudaStream_t>(stream)),
        "cudaMemcpy2DAsync");
  }
  Result<std::unique_ptr<HostStaging>> AllocateStaging(int64_t bytes) const override {
    return MakePinnedStaging(device_, bytes);
  }
  Status CheckHostMayWait(void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    MARLIN_RETURN_IF_ERROR(
        device_->errors.Check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture),
                              "cudaStreamIsCapturing"));
    if (capture == cudaStreamCaptureStatusNone) return {};
    return Status(Code::kUnsupported,
                  "stream: captured in a graph, whose replays would not run the host's part");
  }
  Status AddRows(const AddRowsCall& call, void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    return device_->errors.Check(LaunchAddRows(call, static_cast<cudaStream_t>(stream)),
                                 "add_rows");
  }
  Status TransformColumns(const TransformColumnsCall& call, void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    return device_->errors.Check(LaunchTransformColumns(call, static_cast<cudaStream_t>(stream)),
                                 "transform_columns");
  }
  Status Synchronize(void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    MARLIN_RETURN_IF_ERROR(device_->errors.Check(
        cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize"));
    return value_errors_->Take();
  }
  bool calls_block() const override { return false; }
  bool records() const override { return true; }
  bool rounds_activations() const override { return true; }
  /// A token's activations take some 150 KB in a pass of a model with experts.
  int64_t pass_tokens() const override {
    constexpr size_t kFewBytes = size_t{14} << 30;
    constexpr size_t kManyBytes = size_t{32} << 30;
    if (properties_.totalGlobalMem < kFewBytes) return 1024;
    return properties_.totalGlobalMem < kManyBytes ? 2048 : 4096;
  }
  int64_t free_memory() const override {
    const DeviceScope scope(device_->index);
    size_t free = 0;
    size_t total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess ? static_cast<int64_t>(free) : 0;
  }
  Result<std::unique_ptr<RecordedWork>> Record(
      const std::function<Status(void* stream)>& enqueue) const override {
    return RecordGraph(device_, enqueue);
  }
  Result<std::unique_ptr<StreamMarks>> MakeMarks(void* stream, bool holds) const override {
    return MakeEventMarks(device_, stream, holds);
  }

 private:
  Status Copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) const {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    cudaError_t error = cudaMemcpy(to, from, static_cast<size_t>(bytes), kind);
    // A copy from pageable memory may return before its DMA is done, and a stream that does not
    // synchronize with the default one would read stale data.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    return device_->errors.Check(error, "cudaMemcpy");
  }
  Status CopyAsync(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind,
                   void* stream) const {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    return device_->errors.Check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind,
                                                 static_cast<cudaStream_t>(stream)),
                                 "cudaMemcpyAsync");
  }

  std::shared_ptr<DeviceHandle> device_;
  cudaDeviceProp properties_;
  const std::optional<EnvironmentVariable> sparse_setting_ =
      ReadEnvironment("METAL_MARLIN_CUDA_SPARSE");
  std::string model_;
  DeviceCosts costs_;  ///< shape_ points to them.
  DeviceShape shape_;
  CublasHandle cublas_;
  std::unique_ptr<WeightUpload> upload_;
  std::unique_ptr<SplitKScratch> scratch_;
  std::unique_ptr<ValueErrors> value_errors_;
  std::optional<CudaDecoder> decoder_;
  std::optional<LaunchContext> context_;
};

/// Whether this build runs on the device.
Status RunsOn(std::string_view name, int index, const cudaDeviceProp& properties) {
  DeviceSupport device = {name, properties.name, properties.major * 10 + properties.minor};
  const DeviceScope scope(index);
  device.code = DeviceCode();
  device.built = BuiltCodes();
  if (device.code == 0) {
    const NoCode none = WhyNoCode();
    device.error = none.error;
    device.lacks = none.lacks;
  }
  std::string refusal = RefusalOf(device);
  if (refusal.empty()) return {};
  const bool full = device.code == 0 && device.lacks == LacksCode::kNeedsMemory;
  return {full ? Code::kOutOfMemory : Code::kUnsupported, std::move(refusal)};
}

}  // namespace

int DeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

CudaBuild GetCudaBuild() {
  CudaBuild build = {.codes = BuiltCodes()};
  if (cudaRuntimeGetVersion(&build.runtime) != cudaSuccess) cudaGetLastError();
  if (cudaDriverGetVersion(&build.driver) != cudaSuccess) cudaGetLastError();
  for (const FormatInfo& format : AllFormats()) {
    if (!IsBuilt(KindOf(format.format))) build.lacking.emplace_back(format.name);
  }
  return build;
}

Result<std::unique_ptr<Backend>> OpenCuda(std::string_view name) {
  int index = 0;
  if (name == "cuda") {
    if (cudaGetDevice(&index) != cudaSuccess) cudaGetLastError();
  } else {
    const std::string_view number = name.substr(5);
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), index);
    if (parsed.ec != std::errc() || parsed.ptr != number.data() + number.size() || index < 0) {
      return Status(Code::kInvalidArgument,
                    "device: '" + std::string(name) + "' is not cuda:N with a number N");
    }
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || index >= count) {
    cudaGetLastError();
    const std::string why = error == cudaSuccess ? std::to_string(count) + " found"
                                                 : std::string(cudaGetErrorString(error));
    const CudaBuild build = GetCudaBuild();
    return Status(Code::kUnsupported, NoDevice(name, why, build.driver, build.runtime));
  }
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
    return Status(Code::kUnsupported, std::string(name) + ": cudaGetDeviceProperties failed");
  }
  MARLIN_RETURN_IF_ERROR(RunsOn(name, index, properties));
  auto backend = std::make_unique<CudaBackend>(index, properties);
  MARLIN_RETURN_IF_ERROR(backend->MakeShared());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace marlin::cuda
