// Which kernels run a product of heads, and its arguments.
#include "backends/cuda/attention/latent/head_product.cuh"
#include "backends/cuda/decoder/views.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// In fp32; a row's bits do not depend on the others.
cudaError_t LaunchInFloat(const HeadProductArguments& args, cudaStream_t stream) {
  const dim3 grid = HeadProductGrid(args, kRowsAtOnce, kOutputsAtOnce * kHeadProductWarps);
  return LaunchInChain(&HeadProductKernel, grid, kHeadProductThreads, 0, stream, args);
}

/// Precondition: UsesMatrixUnits.
cudaError_t LaunchOnMatrixUnits(const HeadProductArguments& args, cudaStream_t stream) {
  if (args.tokens <= 2 * kDecodeRows) {
    const dim3 grid = HeadProductGrid(args, kDecodeRows, kDecodeTiles * 8);
    return LaunchInChain(&DecodeHeadProductKernel, grid, kHeadProductThreads, 0, stream, args);
  }
  const dim3 grid = HeadProductGrid(args, kManyRows, kManyTiles * 8);
  return LaunchInChain(&PrefillHeadProductKernel, grid, kHeadProductThreads, 0, stream, args);
}

/// Whether matrix units run a product: of f32 x and bf16 weights whose rows are aligned to 16
/// bytes.
bool UsesMatrixUnits(const HeadProductCall& call) {
  const auto aligned = [](const TensorView& view) {
    const int64_t elements = 16 / DTypeBytes(view.dtype());
    return reinterpret_cast<uintptr_t>(view.data()) % 16 == 0 && view.stride(0) % elements == 0 &&
           view.stride(1) % elements == 0;
  };
  const int64_t inputs = call.x.dim(2);
  return call.options.accuracy == Accuracy::kDefault &&
         call.options.determinism == Determinism::kDefault && call.x.dtype() == DType::kF32 &&
         call.weights.dtype() == DType::kBf16 && inputs > 0 && inputs % kHeadProductInputs == 0 &&
         aligned(call.x) && aligned(call.weights);
}

HeadProductArguments ArgumentsOf(const HeadProductCall& call) {
  return {RowsOf(call.x),
          RowsOf(call.weights),
          RowsOf(call.out),
          call.x.dim(0),
          static_cast<int>(call.x.dim(1)),
          static_cast<int>(call.x.dim(2)),
          static_cast<int>(call.weights.dim(1))};
}

}  // namespace

cudaError_t LoadPreparedProduct() { return PrepareKernels(&PreparedProductKernel); }

Status RunPreparedProduct(const HeadProductCall& call, const PrepareLatentsArguments& prepare,
                          const CallContext& context) {
  if (!UsesMatrixUnits(call) || call.x.dim(0) > 2 * kDecodeRows) {
    MARLIN_RETURN_IF_ERROR(
        context.Check(LaunchPrepareLatents(prepare, context.stream), "prepare_latents"));
    return Run(call, context);
  }
  PreparedProductArguments args = {ArgumentsOf(call), prepare};
  const dim3 product = HeadProductGrid(args.product, kDecodeRows, kDecodeTiles * 8);
  args.product_blocks = static_cast<int>(product.x);
  const dim3 grid(product.x + static_cast<unsigned>(PrepareBlocks(prepare)));
  return context.Launch("prepared_product", &PreparedProductKernel, grid, kHeadProductThreads,
                        args);
}

Status Run(const HeadProductCall& call, const CallContext& context) {
  const HeadProductArguments args = ArgumentsOf(call);
  return context.Check(UsesMatrixUnits(call) ? LaunchOnMatrixUnits(args, context.stream)
                                             : LaunchInFloat(args, context.stream),
                       "head_product");
}

}  // namespace marlin::cuda
