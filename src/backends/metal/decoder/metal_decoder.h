// The decoder operations that have Metal kernels. The host runs the others, and the calls that
// these do not take (ops/device/host_decoder.h).
#pragma once

#include <cstdint>
#include <memory>

#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/error_words.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"

namespace marlin::metal {

/// Operations on a driver, which outlives it.
class MetalDecoder final : public DecoderBackend {
 public:
  explicit MetalDecoder(Driver& driver)
      : driver_(driver), errors_(std::make_shared<ErrorWords>(driver)) {}

  bool reads_host_memory() const override { return true; }
  bool Has(DecoderOperation operation) const override;
  /// The host's numbers count: caches and samplers have one layout on both.
  int64_t cache_page_tokens() const override { return 1; }
  int64_t sampler_state_bytes(int64_t /*vocab*/) const override { return 0; }

  bool RoutesRows(const RouteRowsCall& call) const override;
  Status RouteRows(const RouteRowsCall& call, const OperationContext& context) const override;

#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, on_metal) \
  bool Takes(const Name##Call& call) const override;              \
  int64_t WorkspaceBytes(const Name##Call& call) const override;  \
  Status Run(const Name##Call& call, const OperationContext& context) const override;
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

 private:
  template <typename Call>
  Status RunOnDevice(const Call& call, const OperationContext& context) const;

  Driver& driver_;
  const std::shared_ptr<ErrorWords> errors_;
};

}  // namespace marlin::metal
