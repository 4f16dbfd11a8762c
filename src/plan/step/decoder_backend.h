// A backend's decoder operations other than GEMMs, listed in decoder_operations.def.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "marlin/status.h"
#include "plan/step/decoder_step.h"

namespace marlin {

struct RouteRowsCall;

#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) struct Name##Call;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

enum class DecoderOperation : uint8_t {
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) k##Name,
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
};

/// The operation's name in messages: "RMS norm".
constexpr std::string_view DecoderOperationName(DecoderOperation operation) {
  switch (operation) {
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) \
  case DecoderOperation::k##Name:                              \
    return text;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
  }
  return "unknown";
}

/// The operation of a call type: kOperationOf<RmsNormCall>.
template <typename Call>
inline constexpr DecoderOperation kOperationOf = Call::kHasNoRow;
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) \
  template <>                                                  \
  inline constexpr DecoderOperation kOperationOf<Name##Call> = DecoderOperation::k##Name;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

/// One device's operations. Thread-safe; const calls have no visible state. A call enqueues its
/// work on the stream; it neither waits for it nor reads device memory on the host, unless the
/// device is the host.
class DecoderBackend {
 public:
  virtual ~DecoderBackend() = default;
  /// Whether device and host share memory, so that the host may fill and read it.
  virtual bool reads_host_memory() const = 0;
  virtual bool Has(DecoderOperation operation) const = 0;
  /// Whether the device itself has it, rather than the host in the memory that they share.
  virtual bool RunsItself(DecoderOperation operation) const { return Has(operation); }
  /// The result of CachePageTokens.
  virtual int64_t cache_page_tokens() const = 0;
  /// The result of SamplerStateBytes.
  virtual int64_t sampler_state_bytes(int64_t vocab) const = 0;

  /// Whether Fuse takes every operation of a kind, so that a model never needs its unfused
  /// operations.
  virtual bool Fuses(StepKind /*kind*/) const { return false; }
  /// Fuses a run of operations from the front of `operations`, a tail of the step's, into the
  /// device's own implementation. The step outlives the result. Called at load, once for each
  /// operation that no earlier run covers.
  virtual Result<FusedRun> Fuse(const StepDescription& /*step*/,
                                std::span<const StepOperation> /*operations*/) const {
    return FusedRun();
  }
  /// The same for values that a run does not take (FusedOperations::Takes): fuses a shorter run
  /// from the front of `operations`, the last ones of that run. Called at load, once for each
  /// operation of a run that no shorter one covers.
  virtual Result<FusedRun> FuseWithin(const StepDescription& /*step*/,
                                      std::span<const StepOperation> /*operations*/) const {
    return FusedRun();
  }

  /// Whether the device runs the product with a router's matrix and the selection in one; if not,
  /// a GEMM and RouteTokens do. It reads types, shapes and alignment of the operands.
  virtual bool RoutesRows(const RouteRowsCall& /*call*/) const { return false; }
  /// Runs a call that RoutesRows and whose options and outputs are valid. The workspace has room
  /// for the logits, f32 [tokens, experts].
  virtual Status RouteRows(const RouteRowsCall& /*call*/,
                           const OperationContext& /*context*/) const {
    return Status(Code::kUnsupported, "router");
  }

/// Whether the device runs a call of an operation that it has: where it shares the host's memory,
/// the host runs the others. The workspace of an operation, and the operation itself; called only
/// if Has(operation).
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal)                                    \
  virtual bool Takes(const Name##Call& /*call*/) const { return Has(DecoderOperation::k##Name); } \
  virtual int64_t WorkspaceBytes(const Name##Call& /*call*/) const { return 0; }                  \
  virtual Status Run(const Name##Call& /*call*/, const OperationContext& /*context*/) const {     \
    return Status(Code::kUnsupported, text);                                                      \
  }
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION
};

}  // namespace marlin
