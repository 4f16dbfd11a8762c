#include "backends/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "backends/cuda/block_gemm.h"
#include "backends/cuda/cublas_product.h"
#include "backends/cuda/device_memory.h"
#include "backends/cuda/fp8_plan.h"
#include "backends/cuda/gemv_plan.h"
#include "backends/cuda/kernel_table.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/meeting_memory.h"
#include "backends/cuda/plan_cache.h"
#include "backends/cuda/prepared_tiles.h"
#include "backends/cuda/shipped_tuning.h"
#include "backends/cuda/variants.h"
#include "backends/cuda/wgmma_plan.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/select.h"

namespace marlin::cuda {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

Element ElementOf(DType type) {
  if (type == DType::kBf16) return Element::kBf16;
  return type == DType::kF16 ? Element::kF16 : Element::kF32;
}

/// The type of the matrix unit's operands.
bool UsesBf16(const GemmDesc& desc) { return desc.a_type != DType::kF16 || !desc.fits_f16; }

/// Rows of staged activations: whole 16 bytes.
int StagedColumns(const GemmDesc& desc) { return static_cast<int>(RoundUp(desc.k, int64_t{8})); }

int64_t StagedBytes(const GemmDesc& desc) {
  if (!NeedsStaging(desc)) return 0;
  return RoundUp(desc.m * StagedColumns(desc) * 2, kWorkspaceAlignment);
}

int64_t QuantizedBytes(const GemmDesc& desc) {
  return RoundUp(desc.m * QuantizedColumns(static_cast<int>(desc.k)), kWorkspaceAlignment);
}

int64_t RowScaleBytes(const GemmDesc& desc) {
  return RoundUp(desc.m * int64_t{sizeof(float)}, kWorkspaceAlignment);
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(int index, const cudaDeviceProp& properties)
      : device_(std::make_shared<DeviceHandle>()), properties_(properties) {
    device_->index = index;
    shape_.multiprocessors = properties.multiProcessorCount;
    shape_.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
    const DeviceScope scope(index);
    for (int blocks = 1; blocks <= kMaxSplits; ++blocks) {
      if (const int found = CountClusters(blocks); found > 0) shape_.clusters[blocks - 1] = found;
    }
  }

  /// Before the first product.
  Status MakeMeetingMemory() {
    MARLIN_ASSIGN_OR_RETURN(meeting_, MeetingMemory::Make(device_));
    return Status();
  }

  DeviceInfo Info() const override {
    DeviceInfo info;
    info.name = "cuda:" + std::to_string(device_->index);
    info.backend = "cuda";
    info.model = properties_.name;
    info.features = {"sm_" + std::to_string(properties_.major) + std::to_string(properties_.minor),
                     std::to_string(properties_.multiProcessorCount) + " multiprocessors",
                     std::to_string(properties_.totalGlobalMem >> 30) + " GiB"};
    for (const KernelDesc& kernel : CudaKernels()) {
      GemmDesc any;
      any.a_type = DType::kBf16;
      any.marlin_w4 = kernel.reads_marlin_w4;
      any.tiled = any.fits_f16 = any.fits_fp8 = true;
      if (kernel.grade == Grade::kW4A8) any.accuracy = Accuracy::kW4A8;
      Support support = CheckSupport(kernel, any, Facts());
      // Some kernels are for the formats of integers.
      any.format = Format::kU4;
      if (!support.ok()) support = CheckSupport(kernel, any, Facts());
      info.kernels.push_back(
          {kernel.name, kernel.op, support.ok(), support.reason, kernel.chosen == Chosen::kByName});
    }
    return info;
  }

  /// Info asks every kernel, and one of them looks for a library.
  std::string Model() const override { return properties_.name; }

  DeviceFacts Facts() const override {
    DeviceFacts facts;
    facts.level = Isa::kSm90;
    facts.has_dense_library = HasCublas;
    return facts;
  }

  std::span<const KernelDesc> Kernels() const override { return CudaKernels(); }

  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    MARLIN_ASSIGN_OR_RETURN(auto prepared, PreparedTiles::Make(weights, options, this, device_));
    return std::shared_ptr<const PreparedWeights::Storage>(std::move(prepared));
  }

  std::vector<KernelVariant> Variants(const KernelDesc& kernel,
                                      const GemmDesc& desc) const override {
    return VariantsOf(kernel, desc, shape_);
  }
  bool CanRunAs(const KernelDesc& kernel, const GemmDesc& desc,
                const KernelVariant& variant) const override {
    return cuda::CanRunAs(kernel, desc, shape_, variant);
  }
  bool PassesOver(const KernelDesc& kernel, const GemmDesc& desc) const override {
    if (!IsGemv(kernel) || desc.n <= 0 || desc.k <= 0) return false;
    return plans_.WgmmaTakesLess(ProblemOf(desc), shape_);
  }
  std::string_view ShippedTuning() const override { return cuda::ShippedTuning(); }

  int64_t WorkspaceBytes(const KernelDesc& kernel, const GemmDesc& desc,
                         const KernelVariant& variant) const override {
    if (desc.m == 0 || desc.n == 0 || desc.k == 0 || kernel.grade == Grade::kExact) return 0;
    if (IsCublas(kernel)) return StagedBytes(desc) + CublasWorkspace::Of(desc).bytes;
    const TileProblem problem = ProblemOf(desc);
    if (kernel.grade == Grade::kW4A8) {
      return QuantizedBytes(desc) + RowScaleBytes(desc) +
             (PlanFp8(problem, shape_).partials ? PartialBytes(problem, 1) : 0);
    }
    return StagedBytes(desc) + PartialsOf(kernel, variant, problem);
  }

  Status Run(const GemmCall& call) const override {
    if (call.desc.m == 0 || call.desc.n == 0) return Status();
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    // A sum of nothing is zero, and only the exact kernel and blocks count to zero.
    const bool exact = call.kernel->grade == Grade::kExact ||
                       (call.desc.k == 0 && !BlockKernelOf(call.kernel->name));
    if (exact) return device_->errors.Check(RunExact(call), call.kernel->name);
    if (call.kernel->grade == Grade::kW4A8) {
      return device_->errors.Check(RunFp8(call), call.kernel->name);
    }
    TileGemm gemm;
    auto* workspace = static_cast<uint8_t*>(call.workspace);
    MARLIN_RETURN_IF_ERROR(
        device_->errors.Check(MakeTileGemm(call, &gemm, &workspace), call.kernel->name));
    if (IsCublas(*call.kernel)) {
      return cublas_.Run(gemm, call, workspace, device_->errors);
    }
    gemm.partials = reinterpret_cast<float*>(workspace);
    return device_->errors.Check(RunTiles(call, gemm), call.kernel->name);
  }

  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    const auto& prepared = static_cast<const PreparedTiles&>(weights);
    const DenseView dense = {out.data(), ElementOf(out.dtype()), out.stride(0), out.stride(1)};
    auto* on = static_cast<cudaStream_t>(stream);
    const auto launch = [&] {
      if (prepared.marlin_w4) {
        return LaunchDequantizeMarlinW4(prepared.MarlinW4(expert), dense, on);
      }
      if (!prepared.tiled) return LaunchDequantizeCanonical(prepared.Canonical(expert), dense, on);
      return LaunchDequantizeTiles(prepared.Tiles(expert), prepared.kind(), dense, on);
    };
    return device_->errors.Check(launch(), "marlin_dequantize");
  }

  const DecoderBackend* decoder() const override { return nullptr; }

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
  Status Synchronize(void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    return device_->errors.Check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)),
                                 "cudaStreamSynchronize");
  }
  bool calls_block() const override { return false; }

 private:
  Status Copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) const {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    cudaError_t error = cudaMemcpy(to, from, static_cast<size_t>(bytes), kind);
    // From pageable memory it may return before the data have come, and streams that do not wait
    // for the default one would read what was there before.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    return device_->errors.Check(error, "cudaMemcpy");
  }

  static bool IsGemv(const KernelDesc& kernel) {
    return kernel.grade == Grade::kBf16Compute && kernel.tile_m <= kMaxGemvRows;
  }

  int64_t PartialsOf(const KernelDesc& kernel, const KernelVariant& variant,
                     const TileProblem& problem) const {
    if (const auto block = BlockKernelOf(kernel.name)) {
      const BlockPlan plan = PlanBlocks(*block, problem, shape_);
      return plan.partials ? PartialBytes(problem, plan.parallel) : 0;
    }
    if (IsGemv(kernel)) {
      const GemvPlan plan = plans_.Of(problem, shape_);
      return plan.partials ? PartialBytes(problem, plan.splits) : 0;
    }
    return SumBytes(problem, WgmmaPlanOf(variant, problem));
  }

  WgmmaPlan WgmmaPlanOf(const KernelVariant& variant, const TileProblem& problem) const {
    return variant.automatic() ? PlanWgmma(problem, shape_)
                               : PlanWgmmaAs(problem, shape_, {variant.width, variant.splits});
  }

  static EpilogueView EpilogueOf(const GemmCall& call) {
    EpilogueView view;
    view.out = call.c;
    view.stride = call.c_stride;
    view.type = ElementOf(call.desc.c_type);
    view.bias = call.epilogue.bias;
    view.bias_type = ElementOf(call.epilogue.bias_type);
    view.activation = static_cast<int>(call.epilogue.activation);
    view.gated = call.epilogue.gated;
    view.row_weight = call.epilogue.row_weight;
    view.n = static_cast<int>(call.desc.n);
    return view;
  }

  static ActivationView ActivationsOf(const GemmCall& call) {
    return {call.a, call.a_stride, ElementOf(call.desc.a_type), static_cast<int>(call.desc.m),
            static_cast<int>(call.desc.k)};
  }

  cudaError_t RunExact(const GemmCall& call) const {
    const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
    auto* stream = static_cast<cudaStream_t>(call.stream);
    const ExactProduct product = {ActivationsOf(call), EpilogueOf(call), call.overlap_previous};
    return prepared.tiled
               ? LaunchExactTiles(prepared.Tiles(call.expert), prepared.kind(), product, stream)
               : LaunchExactCanonical(prepared.Canonical(call.expert), prepared.kind(), product,
                                      stream);
  }

  cudaError_t RunFp8(const GemmCall& call) const {
    const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
    auto* stream = static_cast<cudaStream_t>(call.stream);
    auto* quantized = static_cast<uint8_t*>(call.workspace);
    auto* row_scales = reinterpret_cast<float*>(quantized + QuantizedBytes(call.desc));
    TileGemm gemm;
    gemm.weights = prepared.Tiles(call.expert);
    gemm.kind = prepared.kind();
    gemm.a = ActivationsOf(call);
    const int columns = QuantizedColumns(gemm.a.k);
    const cudaError_t error = LaunchQuantizeRows(gemm.a, quantized, columns, row_scales, stream);
    if (error != cudaSuccess) return error;
    gemm.a.data = quantized;
    gemm.a.stride = gemm.a.k = columns;
    gemm.epilogue = EpilogueOf(call);
    gemm.epilogue.multiplier = gemm.weights.multiplier * PowerOf(kFp8Shift);
    gemm.partials = row_scales + RowScaleBytes(call.desc) / int64_t{sizeof(float)};
    return LaunchFp8(gemm, row_scales, PlanFp8(ProblemOf(call.desc), shape_), stream);
  }

  /// Describes a product on tiles, and puts its activations into the workspace where they cannot
  /// be read as they are; `workspace` moves behind them.
  static cudaError_t MakeTileGemm(const GemmCall& call, TileGemm* gemm, uint8_t** workspace) {
    const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
    gemm->weights =
        prepared.marlin_w4 ? prepared.MarlinW4(call.expert).codes : prepared.Tiles(call.expert);
    gemm->kind = prepared.kind();
    gemm->bf16 = UsesBf16(call.desc);
    gemm->a = ActivationsOf(call);
    gemm->epilogue = EpilogueOf(call);
    gemm->epilogue.multiplier =
        gemm->weights.multiplier *
        PowerOf(ExponentsOf(gemm->kind, gemm->bf16).shift + gemm->weights.table_exponent);
    gemm->overlap_previous = call.overlap_previous;
    if (!NeedsStaging(call.desc)) return cudaSuccess;
    const int columns = StagedColumns(call.desc);
    const cudaError_t error = LaunchStageActivations(gemm->a, *workspace, columns, gemm->bf16,
                                                     static_cast<cudaStream_t>(call.stream));
    gemm->a.data = *workspace;
    gemm->a.stride = columns;
    *workspace += StagedBytes(call.desc);
    return error;
  }

  cudaError_t RunTiles(const GemmCall& call, const TileGemm& gemm) const {
    auto* stream = static_cast<cudaStream_t>(call.stream);
    const TileProblem problem = ProblemOf(call.desc);
    if (const auto block = BlockKernelOf(call.kernel->name)) {
      const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
      MarlinW4View w4;
      if (prepared.marlin_w4) w4 = prepared.MarlinW4(call.expert);
      w4.codes = gemm.weights;
      return LaunchBlockGemm(*block, gemm, w4, PlanBlocks(*block, problem, shape_), stream);
    }
    if (IsGemv(*call.kernel)) return RunGemv(problem, gemm, stream);
    return RunWgmma(WgmmaPlanOf(call.variant, problem), gemm, stream);
  }

  cudaError_t RunWgmma(const WgmmaPlan& plan, TileGemm gemm, cudaStream_t stream) const {
    if (plan.arguments.streamed > 0) {
      gemm.meeting = meeting_->Of(gemm.partials, StreamTicketBytes(plan));
    }
    return LaunchWgmma(gemm, plan, stream);
  }

  cudaError_t RunGemv(const TileProblem& problem, TileGemm gemm, cudaStream_t stream) const {
    const GemvPlan plan = plans_.Of(problem, shape_);
    if (plan.in_memory) gemm.meeting = meeting_->Of(gemm.partials, MeetingBytes(plan));
    return LaunchGemv(gemm, plan, stream);
  }

  static float PowerOf(int exponent) { return std::ldexp(1.0F, exponent); }

  std::shared_ptr<DeviceHandle> device_;
  cudaDeviceProp properties_;
  DeviceShape shape_;
  mutable PlanCache plans_;
  CublasGemm cublas_;
  std::unique_ptr<MeetingMemory> meeting_;
};

}  // namespace

int DeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
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
    const std::string why = error == cudaSuccess ? std::to_string(count) + " devices are there"
                                                 : std::string(cudaGetErrorString(error));
    return Status(Code::kUnsupported, std::string(name) + ": no CUDA device (" + why + ")");
  }
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
    return Status(Code::kUnsupported, std::string(name) + ": no properties");
  }
  if (properties.major != 9) {
    return Status(Code::kUnsupported,
                  std::string(name) + ": " + properties.name + " has compute capability " +
                      std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                      "; the kernels are for 9.0 (Hopper)");
  }
  auto backend = std::make_unique<CudaBackend>(index, properties);
  MARLIN_RETURN_IF_ERROR(backend->MakeMeetingMemory());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace marlin::cuda
