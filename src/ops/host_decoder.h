// The operations beside the products, for devices whose memory is the host's: the CPU runs them.
#pragma once

#include <memory>

#include "plan/decoder_backend.h"

namespace marlin {

class HostDecoder final : public DecoderBackend {
 public:
  /// `host` has a decoder, `device` shares its memory and looks up rows of its own weights.
  HostDecoder(std::unique_ptr<Backend> host, const Backend& device)
      : host_(std::move(host)), device_(device) {}

  void LookUpRows(const TensorView& table, std::span<const int32_t> ids,
                  const MutableTensorView& out) const override {
    Ready().LookUpRows(table, ids, out);
  }
  Status LookUpRows(const PreparedWeights::Storage& table, std::span<const int32_t> ids,
                    const MutableTensorView& out) const override {
    return device_.LookUpRows(table, ids, out);
  }
  void Convert(const TensorView& x, const MutableTensorView& out) const override {
    Ready().Convert(x, out);
  }
  void RmsNorm(const TensorView& x, const TensorView& weight, float epsilon,
               const MutableTensorView& out) const override {
    Ready().RmsNorm(x, weight, epsilon, out);
  }
  void AddTo(const TensorView& y, const MutableTensorView& x, float scale) const override {
    Ready().AddTo(y, x, scale);
  }
  void ApplyRotary(const RotaryEmbedding& rotary, std::span<const int32_t> positions,
                   const MutableTensorView& x) const override {
    Ready().ApplyRotary(rotary, positions, x);
  }
  void ApplyGate(const TensorView& gate, const TensorView& up, const MutableTensorView& out,
                 const GateOptions& options) const override {
    Ready().ApplyGate(gate, up, out, options);
  }
  int64_t AttentionWorkspaceBytes(std::span<const AttentionInput> inputs,
                                  const AttentionOptions& options) const override {
    return host_->decoder()->AttentionWorkspaceBytes(inputs, options);
  }
  void Attention(std::span<const AttentionInput> inputs, const AttentionOptions& options,
                 void* workspace) const override {
    Ready().Attention(inputs, options, workspace);
  }
  int64_t RouteWorkspaceBytes(int64_t experts) const override {
    return host_->decoder()->RouteWorkspaceBytes(experts);
  }
  Status RouteTokens(const TensorView& logits, const RouterOptions& options,
                     const MutableTensorView& ids, const MutableTensorView& weights,
                     void* workspace) const override {
    return Ready().RouteTokens(logits, options, ids, weights, workspace);
  }

 private:
  /// The host's operations, once the device has written what they read. If it has failed, the next
  /// call of the device says so.
  const DecoderBackend& Ready() const {
    (void)device_.Synchronize(nullptr);
    return *host_->decoder();
  }

  std::unique_ptr<Backend> host_;
  const Backend& device_;
};

}  // namespace marlin
