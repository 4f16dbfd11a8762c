// Norms: which kernels run a call, and their arguments.
#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/decoder/views.h"
#include "backends/cuda/rows/norm_launch.h"

namespace marlin::cuda {
namespace {

Status RunNorm(const TensorView& x, const RowsView& block, const TensorView& weight, float epsilon,
               const TensorView& out, const CallContext& context) {
  const RmsNormArguments args = {RowsOf(x),
                                 block,
                                 RowsOf(out),
                                 weight.data(),
                                 ElementOf(weight.dtype()),
                                 static_cast<int>(weight.dim(0)),
                                 epsilon};
  const bool many = args.x.rows >= kManyNormRows && TakesNormRows(args);
  return context.Check((many ? &LaunchNormRows : &LaunchNorm)(args, context.stream), "norm");
}

}  // namespace

template <>
cudaError_t Load<RmsNormCall>() {
  const cudaError_t error = LoadNorm();
  return error != cudaSuccess ? error : LoadNormRows();
}

template <>
cudaError_t Load<CenterRowsCall>() {
  return LoadCenterRows();
}

Status Run(const CenterRowsCall& call, const CallContext& context) {
  const auto columns = static_cast<int>(call.x.dim(1));
  return context.Check(LaunchCenterRows(RowsOf(call.x), columns, context.stream), "center");
}

Status Run(const RmsNormCall& call, const CallContext& context) {
  return RunNorm(call.x, {}, call.weight, call.epsilon, call.out, context);
}

Status Run(const AddRmsNormCall& call, const CallContext& context) {
  return RunNorm(call.residual, RowsOf(call.block), call.weight, call.epsilon, call.out, context);
}

}  // namespace marlin::cuda
