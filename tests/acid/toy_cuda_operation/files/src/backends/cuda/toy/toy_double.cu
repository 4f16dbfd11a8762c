// A toy operation through a workspace: proof that an operation on CUDA is one folder and one row.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/decoder/operations.h"
#include "plan/toy_double_call.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void AddKernel(const float* x, const float* y, float* out, int64_t count) {
  EnterChain();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = x[i] + (y == nullptr ? 0.0f : y[i]);
}

}  // namespace

template <>
cudaError_t Load<ToyDoubleCall>() {
  return PrepareKernels(&AddKernel);
}

int64_t WorkspaceBytes(const ToyDoubleCall& call) { return call.x.ByteCount(); }

Status Run(const ToyDoubleCall& call, const CallContext& context) {
  const float* const x = call.x.As<float>();
  const float* const none = nullptr;
  auto* const copy = static_cast<float*>(context.workspace);
  const int64_t count = call.x.dim(0);
  const dim3 grid(static_cast<unsigned>((count + kThreads - 1) / kThreads));
  const Status status =
      context.Launch("toy_copy", &AddKernel, grid, kThreads, x, none, copy, count);
  if (!status.ok()) return status;
  const float* const same = copy;
  return context.Launch("toy_add", &AddKernel, grid, kThreads, x, same, call.out.As<float>(),
                        count);
}

}  // namespace marlin::cuda
