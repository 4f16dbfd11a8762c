// ExpandLatents: which kernels run a call, and their arguments.
#include <cstdint>

#include "backends/cuda/attention/latent/expand_latents_launch.h"
#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/decoder/views.h"

namespace marlin::cuda {
namespace {

/// See LaunchMatrixExpandLatents.
bool UsesMatrixUnits(const ExpandLatentsCall& call) {
  const PagedCache& latents = call.latents;
  const int64_t elements = kCacheAlignment / DTypeBytes(latents.type);
  const auto panels = [](int64_t features) {
    return features > 0 && features % kExpandedFeatures == 0;
  };
  const auto aligned = [](const TensorView& weights) {
    return weights.dtype() == DType::kBf16 && weights.stride(0) % 8 == 0 &&
           weights.stride(1) % 8 == 0 &&
           reinterpret_cast<uintptr_t>(weights.data()) % kCacheAlignment == 0;
  };
  const bool narrow = latents.type == DType::kBf16 || latents.type == DType::kF8E4M3;
  return narrow && call.heads.type == DType::kBf16 && panels(latents.value_dim) &&
         panels(call.key_weights.dim(2)) && panels(call.heads.value_dim) &&
         latents.key_dim % elements == 0 && latents.page_stride % elements == 0 &&
         latents.first_element % elements == 0 && SlabsAreAligned(latents) &&
         call.heads.page_stride % 8 == 0 && call.heads.first_element % 8 == 0 &&
         call.heads.key_dim % 8 == 0 && SlabsAreAligned(call.heads) && aligned(call.key_weights) &&
         aligned(call.value_weights);
}

}  // namespace

template <>
cudaError_t Load<ExpandLatentsCall>() {
  return LoadExpandLatents();
}

int64_t WorkspaceBytes(const ExpandLatentsCall& call, const DeviceShape& /*device*/) {
  return SlabTableBytes(call.latents);
}

Status Run(const ExpandLatentsCall& call, const CallContext& context) {
  const PagedCache& heads = call.heads;
  ExpandLatentsArguments args;
  args.sequences.block_tables = call.pages.As<int32_t>();
  args.sequences.count = 1;
  args.sequences.blocks = static_cast<int>(call.pages.dim(0));
  args.tokens = call.tokens.As<int32_t>();
  args.key_weights = RowsOf(call.key_weights);
  args.value_weights = RowsOf(call.value_weights);
  args.nope = static_cast<int>(call.key_weights.dim(2));
  args.heads = static_cast<int>(heads.kv_heads);
  args.key_dim = static_cast<int>(heads.key_dim);
  args.value_dim = static_cast<int>(heads.value_dim);
  args.out_type = ElementOf(heads.type);
  args.out = static_cast<uint8_t*>(heads.slabs[0]) + heads.first_element * DTypeBytes(heads.type);
  args.page_stride = heads.page_stride;
  args.errors = context.errors;
  cudaError_t error = PagesOf(call.latents, context, &args.latents);
  if (error == cudaSuccess) {
    error = UsesMatrixUnits(call) ? LaunchMatrixExpandLatents(args, context.stream)
                                  : LaunchExpandLatents(args, context.stream);
  }
  return context.Check(error, "expand_latents");
}

}  // namespace marlin::cuda
