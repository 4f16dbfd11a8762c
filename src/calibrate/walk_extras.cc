#include "calibrate/walk_extras.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"

namespace marlin {

void WalkExtras::Start(const DecoderConfig& config, std::unique_ptr<DecoderEnds> ends,
                       std::span<const std::vector<int32_t>> texts, int64_t tokens) {
  const int64_t features = config.shape.layer_features;
  if (features == 0) return;
  texts_.assign(texts.begin(), texts.end());
  ends_ = std::move(ends);
  embeddings_.resize(static_cast<size_t>(tokens * features));
}

Status WalkExtras::Begin(const DecoderConfig& config, int64_t layer,
                         std::span<const WindowChunk> chunks,
                         const std::vector<std::vector<float>>& hidden, Runs runs) {
  const auto reads = [&](const LayerConfig& other) { return other.sizes.kv_source == layer; };
  if (std::any_of(config.layers.begin(), config.layers.end(), reads)) {
    sources_[layer].hidden = hidden;
  }
  if (ends_) {
    MARLIN_RETURN_IF_ERROR(ends_->EmbedLayer(texts_, chunks, layer, embeddings_.data()));
  }
  const int64_t source = config.layer(layer).sizes.kv_source;
  for (size_t model = 0; model < runs.size(); ++model) {
    LayerExtras extras;
    if (ends_) extras.embeddings = embeddings_.data();
    if (source >= 0) {
      extras.source = sources_[source].hidden[model].data();
      runs[model]->SetSource(std::move(sources_[source].layers[model]));
    }
    runs[model]->SetExtras(extras);
  }
  return {};
}

void WalkExtras::End(const DecoderConfig& config, int64_t layer, Runs runs) {
  const int64_t source = config.layer(layer).sizes.kv_source;
  const auto own = sources_.find(layer);
  for (size_t model = 0; model < runs.size(); ++model) {
    if (own != sources_.end()) {
      DecoderLayer taken = runs[model]->TakeLayer();
      taken.mlp = {};
      taken.experts = {};
      own->second.layers.push_back(std::move(taken));
    }
    if (source >= 0) sources_[source].layers[model] = runs[model]->TakeSource();
  }
}

}  // namespace marlin
