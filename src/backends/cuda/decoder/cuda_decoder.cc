#include "backends/cuda/decoder/cuda_decoder.h"

#include <variant>

#include "backends/cuda/attention/latent/latent_steps.h"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/decoder/operations.h"
#include "backends/cuda/persistent/persistent_step.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// The `cuda` column of a row.
struct Parts {
  bool runs = false;
  bool scratch = false;
  bool loads = false;

  constexpr Parts operator|(const Parts& other) const {
    return {runs || other.runs, scratch || other.scratch, loads || other.loads};
  }
};
constexpr Parts kAbsent = {};
constexpr Parts kRuns = {true, false, false};
constexpr Parts kScratch = {true, true, false};
constexpr Parts kLoads = {true, false, true};

template <DecoderOperation kOperation>
constexpr Parts kPartsOf = kAbsent;
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) \
  template <>                                                  \
  constexpr Parts kPartsOf<DecoderOperation::k##Name> = cuda;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

template <typename Call>
cudaError_t LoadKernels() {
  if constexpr (kPartsOf<kOperationOf<Call>>.loads) return marlin::cuda::Load<Call>();
  return cudaSuccess;
}

}  // namespace

Status CudaDecoder::Load() const {
  const DeviceScope scope(device_->index);
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) \
  MARLIN_RETURN_IF_ERROR(device_->errors.Check(LoadKernels<Name##Call>(), text));
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
  return {};
}

bool CudaDecoder::Has(DecoderOperation operation) const {
  switch (operation) {
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) \
  case DecoderOperation::k##Name:                              \
    return kPartsOf<DecoderOperation::k##Name>.runs;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
  }
  return false;
}

int64_t CudaDecoder::cache_page_tokens() const { return kCachePageTokens; }

int64_t CudaDecoder::sampler_state_bytes(int64_t vocab) const { return SamplerStateBytes(vocab); }

Result<FusedRun> CudaDecoder::Fuse(const StepDescription& step,
                                   std::span<const StepOperation> operations) const {
  if (!persistent_) return FusedRun{0, nullptr, "METAL_MARLIN_CUDA_PERSISTENT is 0"};
  if (!shape_.has_wgmma) {
    return FusedRun{0, nullptr, "the persistent kernel is for 9.0a"};
  }
  if (const auto* const attention = std::get_if<AttentionStep>(&operations.front())) {
    return FuseLatentAttention(device_, errors_, scratch_, shape_, step, *attention);
  }
  return FusePersistent(*pool_, errors_, shape_, step, operations);
}

Result<FusedRun> CudaDecoder::FuseWithin(const StepDescription& step,
                                         std::span<const StepOperation> operations) const {
  if (!persistent_ || !shape_.has_wgmma) return FusedRun();
  return marlin::cuda::FuseWithin(*pool_, errors_, shape_, step, operations);
}

bool CudaDecoder::RoutesRows(const RouteRowsCall& call) const {
  return marlin::cuda::RoutesRows(call, shape_);
}

Status CudaDecoder::RouteRows(const RouteRowsCall& call, const OperationContext& context) const {
  return RunOnDevice(call, context);
}

template <typename Call>
Status CudaDecoder::RunOnDevice(const Call& call, const OperationContext& context) const {
  MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
  const DeviceScope scope(device_->index);
  return marlin::cuda::Run(call, {static_cast<cudaStream_t>(context.stream), context.workspace,
                                  errors_.view(), device_->errors, scratch_, shape_});
}

#define MARLIN_DECODER_OPERATION(Name, text, cpu, on_cuda, metal)                              \
  int64_t CudaDecoder::WorkspaceBytes([[maybe_unused]] const Name##Call& call) const {         \
    if constexpr (kPartsOf<DecoderOperation::k##Name>.scratch) {                               \
      return marlin::cuda::WorkspaceBytes(call, shape_);                                       \
    }                                                                                          \
    return 0;                                                                                  \
  }                                                                                            \
  Status CudaDecoder::Run(const Name##Call& call, const OperationContext& context) const {     \
    if constexpr (kPartsOf<DecoderOperation::k##Name>.runs) return RunOnDevice(call, context); \
    return DecoderBackend::Run(call, context);                                                 \
  }
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

}  // namespace marlin::cuda
