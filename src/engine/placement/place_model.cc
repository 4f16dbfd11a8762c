#include "engine/placement/place_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/placement/choose_host_experts.h"
#include "model/mixer.h"
#include "model/placement.h"
#include "ops/device/device.h"

namespace marlin {
namespace {

class Placer {
 public:
  Placer(const ModelDirectory& model, const Device& device, const ModelOptions& options,
         DType cache_type)
      : model_(model),
        device_(device),
        options_(options),
        cache_type_(cache_type),
        memory_(MemoryOf(device, options.device_memory)) {
    if (memory_ > 0 || options.gpu_layers >= 0) sizes_ = SizeWeights(model, device);
  }

  Result<ModelPlacement> Place() {
    MARLIN_RETURN_IF_ERROR(Check());
    ModelPlacement placement;
    MARLIN_ASSIGN_OR_RETURN(const int64_t first, FirstLayer());
    MARLIN_ASSIGN_OR_RETURN(placement.experts, ChooseHostExperts(model_, device_, options_, first));
    placement.layers.count = first;
    if (first > 0) {
      placement.layers.bytes = sizes_.From(0) - sizes_.From(first);
      placement.layers.host = placement.experts.host;
      if (!placement.layers.host) {
        MARLIN_ASSIGN_OR_RETURN(placement.layers.host, Device::Open("cpu"));
      }
    }
    MARLIN_ASSIGN_OR_RETURN(
        placement.for_cache,
        BytesForCache(model_.checkpoint, device_, options_.device_memory,
                      placement.experts.bytes + placement.layers.bytes, BytesOfMixers(first)));
    return placement;
  }

 private:
  const DecoderConfig& config() const { return model_.config; }
  int64_t layers() const { return config().shape.layers; }
  int64_t BytesOfMixers(int64_t first) const {
    return MixerBytes(SettingOf(device_, config(), options_, cache_type_), first);
  }

  Status Check() const {
    if (options_.gpu_layers == kGpuLayersAuto) return {};
    if (options_.gpu_layers < 0 || options_.gpu_layers > layers()) {
      return Invalid(fmt::format("gpu_layers: expected 0..{} (the model's layers), got {}",
                                 layers(), options_.gpu_layers));
    }
    if (ComputesInHostMemory(device_)) {
      return Invalid(
          fmt::format("gpu_layers: {} is the host and runs all layers", device_.info().name));
    }
    if (options_.gpu_layers < layers() && !options_.prepared.empty()) {
      return Invalid("gpu_layers: not with prepared weights, which are all the device's");
    }
    return CheckSources(layers() - options_.gpu_layers);
  }

  /// Layers that share keys and values are on one device.
  Status CheckSources(int64_t first) const {
    for (int64_t layer = first; layer < layers(); ++layer) {
      const int64_t source = config().layer(layer).sizes.kv_source;
      if (source < 0 || source >= first) continue;
      return Invalid(fmt::format(
          "gpu_layers: layer {} reads the keys of layer {}; expected 0 or {}..{}, got {}", layer,
          source, layers() - FirstSource(), layers(), layers() - first));
    }
    return {};
  }

  /// The first layer whose keys others read.
  int64_t FirstSource() const {
    int64_t first = layers();
    for (const LayerConfig& layer : config().layers) {
      if (layer.sizes.kv_source >= 0) first = std::min(first, layer.sizes.kv_source);
    }
    return first;
  }

  /// The first layer that the device runs.
  Result<int64_t> FirstLayer() const {
    if (options_.gpu_layers != kGpuLayersAuto) return layers() - options_.gpu_layers;
    if (memory_ == 0 || ComputesInHostMemory(device_) || !options_.prepared.empty()) return 0;
    MARLIN_ASSIGN_OR_RETURN(const bool whole, Fits(0, 0));
    if (whole) return 0;
    std::vector<int64_t> firsts;
    for (int64_t first = 1; first <= layers(); ++first) {
      if (CheckSources(first).ok()) firsts.push_back(first);
    }
    // With more layers on the host the others take less.
    auto begin = firsts.begin();
    for (auto end = firsts.end(); begin != end;) {
      const auto middle = begin + (end - begin) / 2;
      MARLIN_ASSIGN_OR_RETURN(const bool fits,
                              Fits(*middle, ReservedCacheBytes(config(), cache_type_, *middle)));
      (fits ? end : begin) = fits ? middle : middle + 1;
    }
    // Where nothing fits, the error is of the whole model.
    return begin == firsts.end() ? 0 : *begin;
  }

  /// Whether the layers from `first` on fit with a cache of some bytes, experts of theirs being on
  /// the host as they are asked for.
  Result<bool> Fits(int64_t first, int64_t cache) const {
    const Result<HostExperts> experts = ChooseHostExperts(model_, device_, options_, first);
    if (experts.status().code() == Code::kOutOfMemory) return false;
    MARLIN_RETURN_IF_ERROR(experts.status());
    const int64_t weights = sizes_.From(first) - experts->bytes + BytesOfMixers(first);
    const int64_t activations = first > 0 ? std::min(BytesOfActivations(), memory_ / 8) : 0;
    return weights < memory_ - cache - activations;
  }

  /// About the activations of a long pass: hidden states, an MLP with its gate, and logits.
  int64_t BytesOfActivations() const {
    const Dimensions& shape = config().shape;
    const int64_t inner = std::max(shape.intermediate, shape.top_k * shape.expert_width);
    const Checked widths = Checked(4) * Checked(shape.hidden) + Checked(3) * Checked(inner);
    const Checked values = Checked(Internals::Impl(device_).backend().pass_tokens()) * widths +
                           Checked(kPassTokens) * Checked(shape.vocabulary);
    return (values * Checked(int64_t{sizeof(float)})).Take().value_or(INT64_MAX);
  }

  const ModelDirectory& model_;
  const Device& device_;
  const ModelOptions& options_;
  const DType cache_type_;
  const int64_t memory_;  ///< 0: the host's.
  WeightSizes sizes_;     ///< Empty if they decide nothing.
};

int64_t BytesOf(const Projection& projection) {
  int64_t bytes = 0;
  for (const PreparedWeights& part : projection.parts) bytes += part.bytes();
  return bytes;
}

int64_t BytesOf(const MlpLayer& mlp) { return BytesOf(mlp.gate_up) + BytesOf(mlp.down); }

}  // namespace

int64_t BytesPerToken(const Decoder& part) {
  int64_t bytes = 0;
  int64_t of_experts = 0;
  for (const DecoderLayer& layer : part.layers) {
    for (const Projection& projection : layer.mixer.projections) bytes += BytesOf(projection);
    if (layer.mixer.converted != nullptr) bytes += layer.mixer.converted->bytes();
    bytes += BytesOf(layer.mixer.out) + BytesOf(layer.mlp) + BytesOf(layer.experts.router) +
             BytesOf(layer.experts.shared) + BytesOf(layer.embedding_gate) +
             BytesOf(layer.embedding_projection);
    for (const MlpLayer& expert : layer.experts.experts) of_experts += BytesOf(expert);
  }
  if (of_experts == 0) return bytes;
  const double selected = static_cast<double>(part.config.router.top_k) /
                          static_cast<double>(part.config.shape.experts);
  return bytes + static_cast<int64_t>(selected * static_cast<double>(of_experts));
}

Result<ModelPlacement> PlaceModel(const ModelDirectory& model, const Device& device,
                                  const ModelOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const DType cache_type, CacheType(options));
  return Placer(model, device, options, cache_type).Place();
}

}  // namespace marlin
