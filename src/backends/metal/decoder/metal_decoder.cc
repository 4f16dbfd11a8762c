#include "backends/metal/decoder/metal_decoder.h"

#include <utility>

#include "backends/metal/decoder/operations.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// The `metal` column of a row.
struct Parts {
  bool runs = false;
  bool scratch = false;
};
constexpr Parts kAbsent = {};
constexpr Parts kRuns = {true, false};
constexpr Parts kScratch = {true, true};

template <DecoderOperation kOperation>
constexpr Parts kPartsOf = kAbsent;
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, on_metal) \
  template <>                                                     \
  constexpr Parts kPartsOf<DecoderOperation::k##Name> = on_metal;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

}  // namespace

bool MetalDecoder::Has(DecoderOperation operation) const {
  switch (operation) {
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, on_metal) \
  case DecoderOperation::k##Name:                                 \
    return kPartsOf<DecoderOperation::k##Name>.runs;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
  }
  return false;
}

bool MetalDecoder::RoutesRows(const RouteRowsCall& call) const {
  return marlin::metal::RoutesRows(call);
}

Status MetalDecoder::RouteRows(const RouteRowsCall& call, const OperationContext& context) const {
  return RunOnDevice(call, context);
}

template <typename Call>
Status MetalDecoder::RunOnDevice(const Call& call, const OperationContext& context) const {
  const DeviceShape shape = driver_.Shape();
  CallContext made{shape, context.workspace, *errors_, driver_};
  MARLIN_RETURN_IF_ERROR(Launch(call, &made));
  if (made.launches.empty()) return Status();
  if (made.checks.empty()) return driver_.Run(made.launches, context.stream);
  const auto check = [checks = std::move(made.checks)]() -> Status {
    Status first;
    for (const ResultCheck& each : checks) {
      Status status = each();
      if (first.ok()) first = std::move(status);
    }
    return first;
  };
  return driver_.RunAndCheck(made.launches, context.stream, check);
}

#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, on_metal)                              \
  bool MetalDecoder::Takes([[maybe_unused]] const Name##Call& call) const {                    \
    if constexpr (kPartsOf<DecoderOperation::k##Name>.runs) {                                  \
      return marlin::metal::Takes(call, driver_.Shape());                                      \
    }                                                                                          \
    return false;                                                                              \
  }                                                                                            \
  int64_t MetalDecoder::WorkspaceBytes([[maybe_unused]] const Name##Call& call) const {        \
    if constexpr (kPartsOf<DecoderOperation::k##Name>.scratch) {                               \
      return marlin::metal::WorkspaceBytes(call, driver_.Shape());                             \
    }                                                                                          \
    return 0;                                                                                  \
  }                                                                                            \
  Status MetalDecoder::Run(const Name##Call& call, const OperationContext& context) const {    \
    if constexpr (kPartsOf<DecoderOperation::k##Name>.runs) return RunOnDevice(call, context); \
    return DecoderBackend::Run(call, context);                                                 \
  }
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

}  // namespace marlin::metal
