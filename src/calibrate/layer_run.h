// Runs one layer of a decoder over hidden states in host memory, up to the inputs of its matrices.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "engine/forward.h"
#include "engine/kv_cache.h"
#include "marlin/device.h"
#include "model/layers.h"

namespace marlin {

/// fp32 throughout: a difference between the original and the quantized model should be theirs.
inline ProductOptions ExactProducts() { return {Accuracy::kExact, false, nullptr, DType::kF32}; }

/// Rows [rows, width] in host memory.
struct HostRows {
  std::vector<float> values;
  int64_t width = 0;
  int64_t rows() const { return width == 0 ? 0 : static_cast<int64_t>(values.size()) / width; }
};

/// Copies the rows of some tokens, in their order.
HostRows SelectRows(const HostRows& all, std::span<const int64_t> tokens);

/// The tokens that select each expert: of `ids` [tokens, top_k], in their order.
std::vector<std::vector<int64_t>> TokensByExpert(std::span<const int32_t> ids, int64_t top_k,
                                                 int64_t experts);

/// The windows of one pass, and where their rows are among all.
struct WindowChunk {
  int64_t first = 0;
  int64_t rows = 0;
  std::vector<int64_t> windows;  ///< Lengths in tokens; every window begins at position 0.
};

/// Inputs of the matrices in the first half of a layer.
struct AttentionInputs {
  HostRows x;                   ///< The normalized hidden states.
  std::vector<HostRows> inner;  ///< By ProjectionTensors::input - 1; empty: no such input.
  HostRows mixed;               ///< For the output projection.
};

class LayerRun {
 public:
  /// How far a half of the layer runs: to the normalized hidden states, to the inputs of the
  /// mixer's projections, to the input of the half's last projection, or to the end.
  enum class Depth { kNormed, kInner, kLast, kAll };

  /// `decoder` has no layers. Errors: those of PagePool::Make.
  static Result<std::unique_ptr<LayerRun>> Make(const Device& device, const DecoderConfig& config,
                                                const Checkpoint& checkpoint, int64_t layer);

  /// The same with both halves of the layer of a source, or with their norms alone: enough for
  /// depth kNormed. Errors: also those of LayerSource::Layer.
  static Result<std::unique_ptr<LayerRun>> Load(const Device& device, const DecoderConfig& config,
                                                const Checkpoint& checkpoint,
                                                const LayerSource& source, int64_t layer,
                                                bool matrices = true);

  /// Takes one half from a loaded layer.
  void SetAttention(DecoderLayer layer);
  void SetMlp(DecoderLayer layer);
  const DecoderLayer& layer() const { return decoder_.layers.front(); }

  /// Runs the attention half. hidden [chunk.rows, hidden] is updated at depth kAll. `inputs`,
  /// unless null, receives the inputs on the way.
  Status Attention(const WindowChunk& chunk, Depth depth, float* hidden, AttentionInputs* inputs);
  /// Runs the second half, dense or experts. `normed` and `inner`, unless null, receive the
  /// normalized hidden states and the inputs of a dense layer's down projection.
  Status Mlp(const WindowChunk& chunk, Depth depth, float* hidden, HostRows* normed,
             HostRows* inner);
  /// Ends a half of a dense layer from the inputs of its last projection, which depth kLast gives;
  /// hidden [chunk.rows, hidden] is updated.
  Status EndAttention(const WindowChunk& chunk, const HostRows& mixed, float* hidden);
  Status EndMlp(const WindowChunk& chunk, const HostRows& inner, float* hidden);
  /// Appends the experts that tokens select, [chunk.rows, top_k].
  Status Route(const WindowChunk& chunk, float* hidden, std::vector<int32_t>* ids);
  /// The inputs of an MLP's down projection for rows of its input.
  Result<HostRows> Gate(const MlpLayer& mlp, const HostRows& x);

 private:
  LayerRun(const Device& device, const DecoderConfig& config, const Checkpoint& checkpoint);
  Status Run(const WindowChunk& chunk, const float* hidden, FunctionRef<Status(Pass&)> body);
  Status Fetch(const TensorView& view, HostRows* rows);
  Status EndHalf(Pass& pass, bool mlp, float* hidden);
  Status DownloadHidden(Pass& pass, float* hidden);

  Device device_;
  Decoder decoder_;
  std::shared_ptr<PagePool> pool_;
  Arena arena_;
};

}  // namespace marlin
