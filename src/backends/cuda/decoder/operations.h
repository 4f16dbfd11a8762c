// How the CUDA backend runs decoder operations. For a row of decoder_operations.def, the
// operation's folder defines these functions beside its kernels, as the row's `cuda` column says:
//
//   Status Run(const NameCall& call, const CallContext& context);  Unless kAbsent: puts kernels on
//       the stream. It neither allocates nor synchronizes. The device is current.
//   int64_t WorkspaceBytes(const NameCall& call, const DeviceShape& device);  kScratch: the
//       workspace of a call.
//   template <> cudaError_t Load<NameCall>();  kLoads: prepares the kernels, before the first Run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/common/launch.h"
#include "backends/cuda/layout/value_record.h"
#include "backends/cuda/runtime/cuda_status.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) struct Name##Call;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
}  // namespace marlin

namespace marlin::cuda {

struct DeviceShape;
class SplitKScratch;

/// The launch parameters of a call.
struct CallContext {
  cudaStream_t stream;
  void* workspace;   ///< WorkspaceBytes of the call, aligned to 64 bytes.
  ErrorView errors;  ///< Where kernels record invalid values.
  ErrorLatch& latch;
  SplitKScratch& scratch;
  const DeviceShape& shape;

  /// The status of a launch; `kernel` names it in messages.
  Status Check(cudaError_t error, const char* kernel) const { return latch.Check(error, kernel); }
  /// Launches a kernel of the chain without dynamic shared memory.
  template <typename... Parameters>
  Status Launch(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads,
                const Parameters&... parameters) const {
    return Check(LaunchInChain(kernel, grid, threads, 0, stream, parameters...), name);
  }
};

template <typename Call>
cudaError_t Load();

#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal)               \
  Status Run(const Name##Call& call, const CallContext& context);            \
  int64_t WorkspaceBytes(const Name##Call& call, const DeviceShape& device); \
  template <>                                                                \
  cudaError_t Load<Name##Call>();
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

/// RouteTokens of a product with a router's matrix (DecoderBackend::RouteRows); its kernels belong
/// to RouteTokensCall.
bool RoutesRows(const RouteRowsCall& call, const DeviceShape& shape);
Status Run(const RouteRowsCall& call, const CallContext& context);

/// DecoderBackend::sampler_state_bytes.
int64_t SamplerStateBytes(int64_t vocab);

}  // namespace marlin::cuda
