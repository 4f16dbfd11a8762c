// RotateAndAppend: which kernels run a call, and their arguments.
#include <cstdint>

#include "backends/cuda/attention/rotate_append_launch.h"
#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/decoder/views.h"

namespace marlin::cuda {

template <>
cudaError_t Load<RotateAndAppendCall>() {
  const cudaError_t error = LoadRotateAppend();
  return error != cudaSuccess ? error : LoadRotateRows();
}

int64_t WorkspaceBytes(const RotateAndAppendCall& call, const DeviceShape& /*device*/) {
  return SlabTableBytes(call.cache);
}

Status Run(const RotateAndAppendCall& call, const CallContext& context) {
  if (call.cache.key_dim > kMostRotateFeatures) {
    return RunUnfused(call, [&](const auto& part) { return Run(part, context); });
  }
  RotateAppendArguments args;
  args.queries = RowsOf(call.heads.queries);
  args.keys = RowsOf(call.heads.keys);
  args.values = RowsOf(call.heads.values);
  args.heads = static_cast<int>(call.heads.queries.dim(1));
  args.query_norm = call.norms.queries.data();
  args.query_norm_type = ElementOf(call.norms.queries.dtype());
  args.key_norm = call.norms.keys.data();
  args.key_norm_type = ElementOf(call.norms.keys.dtype());
  args.epsilon = call.norms.epsilon;
  args.rotary = RotaryOf(call.rotary);
  args.sequences = SequencesOf(call.rows);
  args.slabs_are_aligned = SlabsAreAligned(call.cache);
  args.errors = context.errors;
  cudaError_t error = PagesOf(call.cache, context, &args.pages);
  if (error == cudaSuccess) {
    const bool many = args.sequences.rows >= kManyRotateRows && TakesRotateRows(args);
    error = (many ? &LaunchRotateRows : &LaunchRotateAppend)(args, context.stream);
  }
  return context.Check(error, "rotate_append");
}

}  // namespace marlin::cuda
