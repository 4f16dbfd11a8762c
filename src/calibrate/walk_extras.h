// Further inputs of the layers of a walk: embeddings of their own, and the keys and values of other
// layers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "calibrate/decoder_ends.h"
#include "calibrate/layer_run.h"
#include "model/decoder_config.h"

namespace marlin {

class WalkExtras {
 public:
  using Runs = std::span<const std::unique_ptr<LayerRun>>;

  /// Begins a walk over texts of `tokens` tokens.
  void Start(const DecoderConfig& config, std::unique_ptr<DecoderEnds> ends,
             std::span<const std::vector<int32_t>> texts, int64_t tokens);
  /// Gives the runs of a layer, one per model, their further inputs, and keeps what later layers
  /// read of it. `hidden`: the models' hidden states before the layer. Errors: as
  /// DecoderEnds::EmbedLayer.
  Status Begin(const DecoderConfig& config, int64_t layer, std::span<const WindowChunk> chunks,
               const std::vector<std::vector<float>>& hidden, Runs runs);
  /// Takes back what the runs of a layer were given, once they have ended.
  void End(const DecoderConfig& config, int64_t layer, Runs runs);

 private:
  /// A layer whose keys and values later ones read, by model: the hidden states before it, and its
  /// attention.
  struct KvSource {
    std::vector<std::vector<float>> hidden;
    std::vector<DecoderLayer> layers;
  };

  std::map<int64_t, KvSource> sources_;
  // For the layers' own embeddings; empty without such.
  std::vector<std::vector<int32_t>> texts_;
  std::unique_ptr<DecoderEnds> ends_;
  std::vector<float> embeddings_;  ///< The current layer, [tokens, features].
};

}  // namespace marlin
