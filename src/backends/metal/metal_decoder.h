// The decoder operations other than GEMMs that have Metal kernels: routers. The host runs the
// others (ops/device/host_decoder.h), and routers that are too large for a threadgroup.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "backends/metal/moe/router_launches.h"
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
  bool Has(DecoderOperation operation) const override {
    return operation == DecoderOperation::kRouteTokens;
  }
  /// The host's numbers count: it runs these operations.
  int64_t cache_page_tokens() const override { return 1; }
  int64_t sampler_state_bytes(int64_t /*vocab*/) const override { return 0; }

  using DecoderBackend::Run;
  using DecoderBackend::Takes;
  bool Takes(const RouteTokensCall& call) const override;
  Status Run(const RouteTokensCall& call, const OperationContext& context) const override;
  bool RoutesRows(const RouteRowsCall& call) const override;
  Status RouteRows(const RouteRowsCall& call, const OperationContext& context) const override;

 private:
  using MakeLaunch = std::function<KernelLaunch(const RouterRows& rows, ErrorWords::Word* error)>;
  /// Runs a router of `count` rows in parts.
  Status RunParts(int64_t count, int64_t rows_of_part, int64_t experts, void* stream,
                  const MakeLaunch& launch) const;

  Driver& driver_;
  const std::shared_ptr<ErrorWords> errors_;
};

}  // namespace marlin::metal
