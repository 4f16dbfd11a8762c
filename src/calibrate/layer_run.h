// Runs one layer of a decoder over hidden states in host memory, up to the inputs of its matrices.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "calibrate/matrix_inputs.h"
#include "engine/forward.h"
#include "engine/kv_cache.h"
#include "marlin/device.h"
#include "model/layers.h"

namespace marlin {

/// fp32 throughout, so that the original and the quantized model differ only by their weights.
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

/// The windows of one pass, and the position of their rows in the text.
struct WindowChunk {
  int64_t first = 0;
  int64_t rows = 0;
  std::vector<int64_t> windows;  ///< Lengths in tokens; every window begins at position 0.
};

/// Further inputs of a layer, of all tokens; null: the layer has none of the kind.
struct LayerExtras {
  const float* source =
      nullptr;  ///< [tokens, hidden]: what the layer of its keys and values reads.
  const float* embeddings = nullptr;  ///< [tokens, features]: its own.
};

/// The inputs of the matrices in half a layer.
using InputRows = std::map<InputSlot, HostRows>;

class LayerRun {
 public:
  /// How far half a layer runs: to the normalized hidden states, the inputs that a mixer
  /// computes for its projections, the input of the half's last projection, or the end.
  enum class Depth { kNormed, kInner, kLast, kAll };

  /// A layer whose halves are yet to be loaded. Errors: as PagePool::Make.
  static Result<std::unique_ptr<LayerRun>> Make(const Device& device, const DecoderConfig& config,
                                                const Checkpoint& checkpoint, int64_t layer);

  /// Loads half of a layer, or its norms alone, which is enough for depth kNormed. Errors: as
  /// LayerSource::Layer.
  Status Load(const LayerSource& source, int64_t layer, Half half, bool matrices = true);
  const DecoderLayer& layer() const { return decoder_.layers.front(); }
  /// The values must outlive the runs that read them.
  void SetExtras(const LayerExtras& extras) { extras_ = extras; }
  /// Moves the layer, or the one whose keys and values it reads, out of a run that has ended.
  DecoderLayer TakeLayer() { return std::move(decoder_.layers.front()); }
  DecoderLayer TakeSource() { return std::move(decoder_.layers.back()); }
  /// Gives the run the loaded layer whose keys and values it reads.
  void SetSource(DecoderLayer source) { decoder_.layers.back() = std::move(source); }

  /// Runs a half. hidden [chunk.rows, hidden] is updated at depth kAll. `inputs`, unless null,
  /// receives the inputs up to there. A half with experts runs to kNormed or to kAll, to kLast
  /// only if they are next to an MLP; experts have inputs at kNormed only.
  Status Run(Half half, const WindowChunk& chunk, Depth depth, float* hidden, InputRows* inputs);
  /// Ends a half without experts from the input of its last projection; hidden [chunk.rows, hidden]
  /// is updated.
  Status End(Half half, const WindowChunk& chunk, const HostRows& last, float* hidden);
  /// Appends the experts that tokens select, [chunk.rows, top_k], and their weights.
  Status Route(const WindowChunk& chunk, float* hidden, std::vector<int32_t>* ids,
               std::vector<float>* weights);
  /// The input of an MLP's down projection for rows of the MLP's input.
  Result<HostRows> Gate(const MlpLayer& mlp, const HostRows& x);

 private:
  LayerRun(const Device& device, const DecoderConfig& config, const Checkpoint& checkpoint);
  Status RunPass(const WindowChunk& chunk, const float* hidden, FunctionRef<Status(Pass&)> body);
  /// Attention up to `depth`, short of the half's last projection.
  Status Attend(Pass& pass, Depth depth, InputRows* inputs);
  /// The hidden states by each norm before the half.
  Status FetchNormed(Pass& pass, Half half, InputRows* inputs);
  Status Fetch(const TensorView& view, HostRows* rows);
  /// Puts the keys and values that the layer reads in its pages.
  Status RunSource(Pass& pass, const WindowChunk& chunk, const float* hidden);
  /// Adds the layer's own embedding, if it has one, at its end.
  Status AddEmbedding(Pass& pass, const WindowChunk& chunk);
  Status EndHalf(Pass& pass, Half half, const WindowChunk& chunk, float* hidden);
  Status DownloadHidden(Pass& pass, float* hidden);

  Device device_;
  Decoder decoder_;  ///< The layer, and perhaps the one whose keys and values it reads.
  LayerExtras extras_;
  std::shared_ptr<PagePool> pool_;
  Arena arena_;
};

}  // namespace marlin
