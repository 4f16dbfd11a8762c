#include <cuda.h>

#include <array>

#include "backends/cuda/fp8_plan.h"
#include "backends/cuda/gemv_plan.h"
#include "backends/cuda/kernel_functions.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/wgmma_plan.h"

namespace marlin::cuda {
namespace {

const void* GemvFunctionOf(CodeKind kind, bool bf16, const GemvVariant& variant) {
  switch (kind) {
#define MARLIN_KIND(name) \
  case CodeKind::name:    \
    return GemvFunction<CodeKind::name>(bf16, variant);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND
  }
  return nullptr;
}

const void* WgmmaFunctionOf(CodeKind kind, bool bf16, int tokens, ParameterUse use) {
  switch (kind) {
#define MARLIN_KIND(name) \
  case CodeKind::name:    \
    return WgmmaFunction<CodeKind::name>(bf16, tokens, use);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND
  }
  return nullptr;
}

const void* Fp8FunctionOf(CodeKind kind, int tokens, bool one_group) {
  switch (kind) {
#define MARLIN_FP8_KIND(name) \
  case CodeKind::name:        \
    return Fp8Function<CodeKind::name>(tokens, one_group);
#include "backends/cuda/fp8_kinds.def"
#undef MARLIN_FP8_KIND
    default:
      return nullptr;
  }
}

}  // namespace

ParameterUse UseOf(const TileView& view, CodeKind kind) {
  // Integer zeros are subtracted with the offset of the codes, for nothing.
  const bool free_zeros = view.zero_kind == 1 && view.integer_zeros && kind == CodeKind::kInt4;
  if (view.zero_kind != 0 && !free_zeros) return ParameterUse::kAll;
  return view.groups_per_tile <= 1 ? ParameterUse::kOneScale : ParameterUse::kScales;
}

namespace {

struct LaunchSize {
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;
  bool overlap_previous = false;
  dim3 cluster = {1, 1, 1};
};

cudaError_t Launch(const void* function, const LaunchSize& size, void** parameters,
                   cudaStream_t stream) {
  // The same for every launch: the attribute is the function's, and other threads launch it too.
  const cudaError_t error = cudaFuncSetAttribute(
      function, cudaFuncAttributeMaxDynamicSharedMemorySize, DeviceShape().shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = size.grid;
  config.blockDim = dim3(static_cast<unsigned>(size.threads));
  config.dynamicSmemBytes = static_cast<size_t>(size.shared_bytes);
  config.stream = stream;
  std::array<cudaLaunchAttribute, 2> attributes = {};
  config.attrs = attributes.data();
  if (size.overlap_previous) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (size.cluster.x * size.cluster.y > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {size.cluster.x, size.cluster.y, 1};
  }
  return cudaLaunchKernelExC(&config, function, parameters);
}

/// The driver's function, found at run time so that nothing links to the driver.
using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

EncodeFunction FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kVersion = 12000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kVersion, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeFunction>(function)
             : nullptr;
}

/// Boxes of 128 bytes x `tokens` rows in the 128-byte swizzle; zeros outside of A.
cudaError_t EncodeMap(const ActivationView& a, CUtensorMapDataType type, int element_bytes,
                      int tokens, CUtensorMap* map) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const std::array<cuuint64_t, 2> dims = {static_cast<cuuint64_t>(a.k),
                                          static_cast<cuuint64_t>(a.m)};
  // Of one row the stride does not matter, but must be valid.
  const int64_t columns = a.m > 1 ? a.stride : a.k;
  const std::array<cuuint64_t, 1> strides = {
      static_cast<cuuint64_t>((columns * element_bytes + 15) / 16 * 16)};
  const std::array<cuuint32_t, 2> box = {128U / static_cast<cuuint32_t>(element_bytes),
                                         static_cast<cuuint32_t>(tokens)};
  const std::array<cuuint32_t, 2> steps = {1, 1};
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(a.data), dims.data(), strides.data(), box.data(),
             steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// Whether `count` neighbouring 16-bit outputs are one aligned store.
bool StoresAsOne(const EpilogueView& view, int count) {
  const auto bytes = static_cast<uintptr_t>(count) * sizeof(uint16_t);
  return view.n % count == 0 && view.stride % count == 0 &&
         reinterpret_cast<uintptr_t>(view.out) % bytes == 0;
}

/// Whether outputs are sums and biases in 16 bits, and four of them are one aligned store.
bool StoresPlainQuads(const EpilogueView& view) {
  return view.type != Element::kF32 && view.activation == 0 && !view.gated &&
         view.row_weight == nullptr && StoresAsOne(view, 4);
}

cudaError_t AddPartials(const TileGemm& gemm, bool partials, int splits, cudaError_t launched,
                        cudaStream_t stream) {
  if (launched != cudaSuccess || !partials) return launched;
  return LaunchReducePartials(gemm.partials, splits, gemm.a.m, gemm.epilogue, true, stream);
}

}  // namespace

int CountClusters(int blocks) {
  const void* function =
      WgmmaFunctionOf(CodeKind::kFp4, true, kMaxClusterTokens, ParameterUse::kOneScale);
  const int shared_bytes = DeviceShape().shared_bytes;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kWgmmaThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, function, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

cudaError_t LaunchGemv(const TileGemm& gemm, const GemvPlan& plan, cudaStream_t stream) {
  GemvArguments args = plan.arguments;
  args.weights = gemm.weights;
  args.a = gemm.a.data;
  args.a_stride = gemm.a.stride;
  args.epilogue = gemm.epilogue;
  args.partials = plan.partials ? gemm.partials : nullptr;
  if (plan.in_memory && gemm.meeting != nullptr) {
    args.tickets = gemm.meeting;
    args.meeting = reinterpret_cast<float*>(gemm.meeting + TicketWords(plan));
  }
  args.plain_quads = StoresPlainQuads(gemm.epilogue);
  void* parameters[] = {&args};
  const LaunchSize size = {
      dim3(static_cast<unsigned>(plan.splits), static_cast<unsigned>(plan.groups)), plan.warps * 32,
      plan.shared_bytes, gemm.overlap_previous,
      dim3(args.in_cluster ? static_cast<unsigned>(plan.splits) : 1,
           static_cast<unsigned>(args.mates))};
  const GemvVariant variant = {UseOf(gemm.weights, gemm.kind), plan.strips,
                               (args.m + kOctet - 1) / kOctet};
  const void* function = GemvFunctionOf(gemm.kind, gemm.bf16, variant);
  return AddPartials(gemm, plan.partials && args.tickets == nullptr, plan.splits,
                     Launch(function, size, parameters, stream), stream);
}

namespace {

/// Where parts of streamed items meet: the tickets are lent to the product, or else made ready
/// here.
cudaError_t MakeMeeting(const TileGemm& gemm, const WgmmaPlan& plan, WgmmaArguments* args,
                        cudaStream_t stream) {
  args->parts = gemm.partials + StreamTicketBytes(plan) / int64_t{sizeof(float)};
  args->tickets = gemm.meeting;
  if (args->tickets != nullptr) return cudaSuccess;
  args->tickets = reinterpret_cast<uint32_t*>(gemm.partials);
  return cudaMemsetAsync(args->tickets, 0xff, static_cast<size_t>(StreamTicketBytes(plan)), stream);
}

cudaError_t LaunchItems(const TileGemm& gemm, const WgmmaLaunch& launch, float* partials,
                        bool overlap_previous, cudaStream_t stream) {
  CUtensorMap map;
  const cudaError_t encoded = EncodeMap(
      gemm.a, gemm.bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      launch.tokens, &map);
  if (encoded != cudaSuccess) return encoded;
  WgmmaArguments args = launch.arguments;
  args.weights = gemm.weights;
  args.epilogue = gemm.epilogue;
  args.partials = partials;
  args.eights = StoresAsOne(gemm.epilogue, 8);
  void* parameters[] = {&map, &args};
  const auto splits = static_cast<unsigned>(args.splits);
  const LaunchSize size = {dim3(splits, static_cast<unsigned>(launch.groups)), kWgmmaThreads,
                           launch.shared_bytes, overlap_previous,
                           dim3(args.in_cluster ? splits : 1)};
  const void* function =
      WgmmaFunctionOf(gemm.kind, gemm.bf16, launch.tokens, UseOf(gemm.weights, gemm.kind));
  return Launch(function, size, parameters, stream);
}

}  // namespace

cudaError_t LaunchWgmma(const TileGemm& gemm, const WgmmaPlan& plan, cudaStream_t stream) {
  float* const partials = plan.partials ? gemm.partials : nullptr;
  WgmmaLaunch whole = plan;
  cudaError_t launched = cudaSuccess;
  bool overlap_previous = gemm.overlap_previous;
  if (plan.arguments.streamed > 0) {
    launched = MakeMeeting(gemm, plan, &whole.arguments, stream);
    // What is before the product then may be a memset, no kernel.
    overlap_previous = overlap_previous && gemm.meeting != nullptr;
  }
  if (launched == cudaSuccess) {
    launched = LaunchItems(gemm, whole, partials, overlap_previous, stream);
  }
  if (launched == cudaSuccess && plan.tail) {
    launched = LaunchItems(gemm, *plan.tail, partials, true, stream);
  }
  return AddPartials(gemm, plan.partials, PartsOf(plan), launched, stream);
}

namespace {

cudaError_t LaunchItems(const TileGemm& gemm, const float* row_scales, const Fp8Launch& launch,
                        float* partials, cudaStream_t stream) {
  CUtensorMap map;
  const cudaError_t encoded =
      EncodeMap(gemm.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, launch.tokens, &map);
  if (encoded != cudaSuccess) return encoded;
  Fp8Arguments args = launch.arguments;
  args.row_scales = row_scales;
  args.product.weights = gemm.weights;
  args.product.epilogue = gemm.epilogue;
  args.product.partials = partials;
  args.product.eights = StoresAsOne(gemm.epilogue, 8);
  void* parameters[] = {&map, &args};
  // Copies of weights begin while what comes before ends: the last rows are quantized, or the first
  // items are multiplied.
  const LaunchSize size = {dim3(1, static_cast<unsigned>(launch.groups)), kWgmmaThreads,
                           launch.shared_bytes, true};
  const void* function = Fp8FunctionOf(gemm.kind, launch.tokens, gemm.weights.groups_per_tile == 1);
  return Launch(function, size, parameters, stream);
}

}  // namespace

cudaError_t LaunchFp8(const TileGemm& gemm, const float* row_scales, const Fp8Plan& plan,
                      cudaStream_t stream) {
  float* const partials = plan.partials ? gemm.partials : nullptr;
  cudaError_t launched = LaunchItems(gemm, row_scales, plan, partials, stream);
  if (launched == cudaSuccess && plan.tail) {
    launched = LaunchItems(gemm, row_scales, *plan.tail, partials, stream);
  }
  return AddPartials(gemm, plan.partials, 1, launched, stream);
}

}  // namespace marlin::cuda
