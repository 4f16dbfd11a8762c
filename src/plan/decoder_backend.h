// What a backend offers to the operations of decoder.h and moe.h. Arguments come validated: types,
// shapes, ids in range, contiguous last dimensions, no empty views where elements are needed.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "plan/backend.h"

namespace marlin {

class DecoderBackend {
 public:
  virtual ~DecoderBackend() = default;
  virtual void LookUpRows(const TensorView& table, std::span<const int32_t> ids,
                          const MutableTensorView& out) const = 0;
  /// Errors: of the device that holds the table.
  virtual Status LookUpRows(const PreparedWeights::Storage& table, std::span<const int32_t> ids,
                            const MutableTensorView& out) const = 0;
  virtual void Convert(const TensorView& x, const MutableTensorView& out) const = 0;
  virtual void RmsNorm(const TensorView& x, const TensorView& weight, float epsilon,
                       const MutableTensorView& out) const = 0;
  virtual void AddTo(const TensorView& y, const MutableTensorView& x, float scale) const = 0;
  virtual void ApplyRotary(const RotaryEmbedding& rotary, std::span<const int32_t> positions,
                           const MutableTensorView& x) const = 0;
  virtual void ApplyGate(const TensorView& gate, const TensorView& up, const MutableTensorView& out,
                         const GateOptions& options) const = 0;
  virtual int64_t AttentionWorkspaceBytes(std::span<const AttentionInput> inputs,
                                          const AttentionOptions& options) const = 0;
  /// `workspace` holds AttentionWorkspaceBytes, aligned to 64 bytes.
  virtual void Attention(std::span<const AttentionInput> inputs, const AttentionOptions& options,
                         void* workspace) const = 0;
  virtual int64_t RouteWorkspaceBytes(int64_t experts) const = 0;
  /// `workspace` holds RouteWorkspaceBytes, aligned to 64 bytes. Errors: kInvalidArgument for the
  /// first token whose logits are not as moe.h wants them.
  virtual Status RouteTokens(const TensorView& logits, const RouterOptions& options,
                             const MutableTensorView& ids, const MutableTensorView& weights,
                             void* workspace) const = 0;
};

}  // namespace marlin
