// The decoder operations other than GEMMs of devices that share the host's memory: those that the
// device has no kernel for are run by the CPU.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "marlin/device.h"
#include "plan/gemm/backend.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"

namespace marlin {

class HostDecoder final : public DecoderBackend {
 public:
  /// `host` has a decoder; `device` shares its memory. The decoder of a device that prepares
  /// weights takes all lookups in them.
  HostDecoder(std::unique_ptr<Backend> host, const Backend& device)
      : host_(std::move(host)), device_(device), own_(device.decoder()) {}

  bool reads_host_memory() const override { return true; }
  bool Has(DecoderOperation operation) const override { return host_->decoder()->Has(operation); }
  bool RunsItself(DecoderOperation operation) const override {
    return operation == DecoderOperation::kLookUpWeightRows || HasKernel(operation);
  }
  /// The operations that the host has run, in the order of the table.
  std::vector<HostOperation> HostOperations() const {
    std::vector<HostOperation> all;
    for (size_t i = 0; i < host_calls_.size(); ++i) {
      const auto operation = static_cast<DecoderOperation>(i);
      const int64_t calls = host_calls_[i].load(std::memory_order_relaxed);
      if (calls == 0) continue;
      all.push_back({std::string(DecoderOperationName(operation)), calls, HasKernel(operation)});
    }
    return all;
  }
  int64_t cache_page_tokens() const override { return host_->decoder()->cache_page_tokens(); }
  int64_t sampler_state_bytes(int64_t vocab) const override {
    return host_->decoder()->sampler_state_bytes(vocab);
  }

  bool RoutesRows(const RouteRowsCall& call) const override {
    return own_ != nullptr && own_->RoutesRows(call);
  }
  Status RouteRows(const RouteRowsCall& call, const OperationContext& context) const override {
    return own_->RouteRows(call, context);
  }

#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal)                         \
  int64_t WorkspaceBytes(const Name##Call& call) const override {                      \
    const int64_t host = host_->decoder()->WorkspaceBytes(call);                       \
    const bool own = own_ != nullptr && own_->Takes(call);                             \
    return own ? std::max(host, own_->WorkspaceBytes(call)) : host;                    \
  }                                                                                    \
  Status Run(const Name##Call& call, const OperationContext& context) const override { \
    const bool own = own_ != nullptr && own_->Takes(call);                             \
    return own ? own_->Run(call, context) : RunOnHost(call, context);                  \
  }
#include "plan/step/decoder_operations.def"
#undef MARLIN_DECODER_OPERATION

 private:
#define MARLIN_DECODER_OPERATION(Name, text, cpu, cuda, metal) +1
  static constexpr size_t kOperations = 0
#include "plan/step/decoder_operations.def"
      ;
#undef MARLIN_DECODER_OPERATION

  bool HasKernel(DecoderOperation operation) const {
    return own_ != nullptr && own_->Has(operation);
  }

  /// Runs the host's operation after the device has written its inputs.
  template <typename Call>
  Status RunOnHost(const Call& call, const OperationContext& context) const {
    if constexpr (std::is_same_v<Call, LookUpWeightRowsCall>) {
      return Status(Code::kUnsupported, "the host cannot look up rows in the device's weights");
    } else {
      host_calls_[static_cast<size_t>(kOperationOf<Call>)].fetch_add(1, std::memory_order_relaxed);
      MARLIN_RETURN_IF_ERROR(device_.Synchronize(context.stream));
      return host_->decoder()->Run(call, context);
    }
  }

  std::unique_ptr<Backend> host_;
  const Backend& device_;
  const DecoderBackend* const own_;  ///< The device's, or null.
  mutable std::array<std::atomic<int64_t>, kOperations> host_calls_{};
};

}  // namespace marlin
