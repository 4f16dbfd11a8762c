// Experts that get a choice of their own because texts select them often.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/printable.h"
#include "marlin/recipe.h"
#include "marlin/routing.h"
#include "recipe/expert_name.h"

namespace marlin {
namespace {

Status InvalidHotExperts(const std::string& reason) {
  return Status(Code::kInvalidArgument, fmt::format("recipe: hot_experts: {}", reason));
}

const HotExperts::Layer* FindLayer(const HotExperts& hot, int64_t layer) {
  const auto found = std::lower_bound(
      hot.layers.begin(), hot.layers.end(), layer,
      [](const HotExperts::Layer& each, int64_t number) { return each.layer < number; });
  return found != hot.layers.end() && found->layer == layer ? &*found : nullptr;
}

}  // namespace

HotExperts HotExperts::Of(const RoutingFrequencies& frequencies, double fraction,
                          const FormatChoice& choice) {
  HotExperts hot;
  hot.choice = choice;
  hot.model_type = frequencies.model_type;
  for (const RoutingFrequencies::Layer& from : frequencies.layers) {
    const auto experts = static_cast<int64_t>(from.counts.size());
    std::vector<int64_t> order(from.counts.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return from.counts[static_cast<size_t>(a)] > from.counts[static_cast<size_t>(b)];
    });
    const int64_t count = std::llround(fraction * static_cast<double>(experts));
    order.resize(static_cast<size_t>(std::clamp<int64_t>(count, 1, experts)));
    std::sort(order.begin(), order.end());
    hot.layers.push_back({from.layer, experts, std::move(order)});
  }
  return hot;
}

bool HotExperts::Contains(int64_t layer, int64_t expert) const {
  const Layer* const found = FindLayer(*this, layer);
  return found != nullptr && std::binary_search(found->hot.begin(), found->hot.end(), expert);
}

Status MixedPrecisionConfig::CheckHotExperts(std::string_view model_type,
                                             std::span<const TensorShape> tensors) const {
  if (!hot_experts_) return {};
  const std::string& counted = hot_experts_->model_type;
  if (!counted.empty() && !model_type.empty() && counted != model_type) {
    return InvalidHotExperts(
        fmt::format("frequencies of another model: of model_type '{}', not '{}'",
                    Printable(counted), Printable(model_type)));
  }
  std::map<int64_t, int64_t> experts;  // Their number in every layer.
  for (const TensorShape& tensor : tensors) {
    if (!IsWeightMatrix(tensor.name, tensor.shape)) continue;
    if (ClassifyTensor(tensor.name) != LayerClass::kMoeExpert) continue;
    const auto place = ParseExpertPlace(tensor.name);
    if (!place) {
      return InvalidHotExperts(fmt::format("\"{}\" holds several experts, which share one choice",
                                           Printable(tensor.name)));
    }
    int64_t& count = experts[place->layer];
    count = std::max(count, place->expert + 1);
  }
  for (const auto& [layer, count] : experts) {
    const HotExperts::Layer* const found = FindLayer(*hot_experts_, layer);
    if (found == nullptr || found->experts != count) {
      return InvalidHotExperts(
          fmt::format("frequencies of another model: layer {} has {} experts, not {}", layer, count,
                      found == nullptr ? 0 : found->experts));
    }
  }
  for (const HotExperts::Layer& layer : hot_experts_->layers) {
    if (experts.contains(layer.layer)) continue;
    return InvalidHotExperts(
        fmt::format("frequencies of another model: layer {} has 0 experts, not {}", layer.layer,
                    layer.experts));
  }
  return {};
}

}  // namespace marlin
