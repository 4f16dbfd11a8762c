#include "engine/placement/choose_host_experts.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "engine/kv_cache.h"
#include "marlin/expert_placement.h"
#include "marlin/routing.h"
#include "model/layers.h"
#include "model/mixer.h"
#include "ops/device/device.h"

namespace marlin {
namespace {

class Chooser {
 public:
  Chooser(const ModelDirectory& model, const Device& device, const ModelOptions& options,
          int64_t first)
      : model_(model),
        checkpoint_(model.checkpoint),
        config_(model.config),
        device_(device),
        options_(options),
        first_(first),
        weights_(checkpoint_, device_, std::string(config_.family->model_type)) {}

  Result<HostExperts> Choose() {
    MARLIN_RETURN_IF_ERROR(Check());
    MARLIN_RETURN_IF_ERROR(CountSelections());
    LeaveOutOthers();
    HostExperts chosen;
    const bool automatic = options_.host_experts == kHostExpertsAuto;
    std::vector<std::vector<int64_t>> on_device;
    if (automatic) {
      MARLIN_ASSIGN_OR_RETURN(const int64_t budget, Budget());
      MARLIN_ASSIGN_OR_RETURN(on_device, ChooseDeviceExperts(counts_, bytes_, budget));
    } else {
      for (const RoutingFrequencies::Layer& layer : counts_.layers) {
        MARLIN_ASSIGN_OR_RETURN(
            std::vector<int64_t> kept,
            ChooseDeviceExperts(layer.counts, config_.shape.experts - options_.host_experts));
        on_device.push_back(std::move(kept));
      }
    }
    for (size_t i = 0; i < on_device.size(); ++i) {
      std::vector<bool> stays(static_cast<size_t>(config_.shape.experts), true);
      for (const int64_t expert : on_device[i]) stays[static_cast<size_t>(expert)] = false;
      const auto count = static_cast<int64_t>(std::count(stays.begin(), stays.end(), true));
      chosen.count += count;
      chosen.bytes += count * bytes_[i];
      chosen.layers.emplace(counts_.layers[i].layer, std::move(stays));
    }
    if (chosen.count == 0) return HostExperts();
    MARLIN_ASSIGN_OR_RETURN(chosen.host, Device::Open("cpu"));
    return chosen;
  }

 private:
  Status Check() const {
    const int64_t experts = config_.shape.experts;
    if (experts == 0) {
      return Invalid(fmt::format("host_experts: {} has no experts", config_.family->model_type));
    }
    if (options_.host_experts < kHostExpertsAuto || options_.host_experts > experts) {
      return Invalid(fmt::format("host_experts: expected 0..{} (the model's experts), got {}",
                                 experts, options_.host_experts));
    }
    if (!options_.prepared.empty()) {
      return Invalid("host_experts: not with prepared weights, which are all the device's");
    }
    const DecoderBackend* const decoder = Internals::Impl(device_).decoder();
    if (decoder != nullptr && decoder->Fuses(StepKind::kExperts)) {
      return Status(Code::kUnsupported,
                    fmt::format("host_experts: {} runs experts inside a fused operation",
                                device_.info().name));
    }
    return {};
  }

  /// Fills in the layers with experts: their selections, and the bytes of an expert.
  Status CountSelections() {
    const LayerSource source(checkpoint_, config_, device_, nullptr);
    for (int64_t i = 0; i < config_.shape.layers; ++i) {
      if (!IsSparse(*config_.family, config_.shape, i)) continue;
      counts_.layers.push_back(
          {i, std::vector<int64_t>(static_cast<size_t>(config_.shape.experts), 1)});
      bytes_.push_back(std::max<int64_t>(ExpertBytes(source.Tensors(i).experts), 1));
    }
    if (options_.routing == nullptr) return {};
    const RoutingFrequencies& routing = *options_.routing;
    const auto alike = [](const RoutingFrequencies::Layer& a, const RoutingFrequencies::Layer& b) {
      return a.layer == b.layer && a.counts.size() == b.counts.size();
    };
    if (routing.model_type != config_.family->model_type ||
        !std::equal(routing.layers.begin(), routing.layers.end(), counts_.layers.begin(),
                    counts_.layers.end(), alike)) {
      return Invalid(fmt::format("routing: frequencies of another model ({}) than {}",
                                 Printable(routing.model_type), Printable(checkpoint_.path())));
    }
    counts_.layers = routing.layers;
    return {};
  }

  /// Leaves the layers before the first one of the device out.
  void LeaveOutOthers() {
    const auto kept = std::find_if(counts_.layers.begin(), counts_.layers.end(),
                                   [this](const auto& layer) { return layer.layer >= first_; });
    bytes_.erase(bytes_.begin(), bytes_.begin() + (kept - counts_.layers.begin()));
    counts_.layers.erase(counts_.layers.begin(), kept);
  }

  /// The bytes of a layer's largest expert.
  int64_t ExpertBytes(const ExpertsTensors& tensors) const {
    if (tensors.each.empty()) {
      return weights_.BytesOf(tensors.gate_up.name) + weights_.BytesOf(tensors.down.name);
    }
    int64_t most = 0;
    for (const MlpTensors& mlp : tensors.each) {
      int64_t bytes = weights_.BytesOf(mlp.down.weight());
      for (const LinearTensors& linear : mlp.gate_up) bytes += weights_.BytesOf(linear.weight());
      most = std::max(most, bytes);
    }
    return most;
  }

  /// Bytes that the device has left for experts.
  Result<int64_t> Budget() const {
    int64_t experts = 0;
    for (const int64_t bytes : bytes_) experts += bytes * config_.shape.experts;
    const int64_t limit = options_.device_memory;
    const int64_t available = MemoryOf(device_, limit);
    if (available == 0) return experts;
    MARLIN_ASSIGN_OR_RETURN(const DType cache_type, CacheType(options_));
    const int64_t others = SizeWeights(model_, device_).From(first_) - experts +
                           MixerBytes(SettingOf(device_, config_, options_, cache_type), first_);
    const int64_t cache = ReservedCacheBytes(config_, cache_type, first_);
    if (cache <= available - others) return available - others - cache;
    return Status(
        Code::kOutOfMemory,
        fmt::format("{}: without experts, its weights take {} bytes and a KV cache {}; {}",
                    Printable(checkpoint_.path()), others, cache, DescribeMemory(device_, limit)));
  }

  const ModelDirectory& model_;
  const Checkpoint& checkpoint_;
  const DecoderConfig& config_;
  const Device& device_;
  const ModelOptions& options_;
  const int64_t first_;
  WeightSource weights_;
  RoutingFrequencies counts_;
  std::vector<int64_t> bytes_;  ///< Size of an expert, by layer with experts.
};

}  // namespace

Result<HostExperts> ChooseHostExperts(const ModelDirectory& model, const Device& device,
                                      const ModelOptions& options, int64_t first) {
  if (options.host_experts == 0) return HostExperts();
  return Chooser(model, device, options, first).Choose();
}

}  // namespace marlin
