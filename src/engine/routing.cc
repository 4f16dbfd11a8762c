// Counts the experts that the tokens of a text select.
#include "marlin/routing.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "engine/forward_call.h"
#include "engine/model_impl.h"

namespace marlin {
namespace {

/// The layers with experts, with no selections yet.
RoutingFrequencies NoSelections(const Model::Impl& model) {
  RoutingFrequencies frequencies;
  frequencies.model_type = model.info.model_type;
  frequencies.top_k = model.decoder.config.router.top_k;
  const std::vector<DecoderLayer>& layers = model.decoder.layers;
  for (size_t i = 0; i < layers.size(); ++i) {
    int64_t experts = layers[i].experts.count();
    if (model.host != nullptr) experts += model.host->decoder.layers[i].experts.count();
    if (experts == 0) continue;
    frequencies.layers.push_back(
        {static_cast<int64_t>(i), std::vector<int64_t>(static_cast<size_t>(experts))});
  }
  return frequencies;
}

Status CheckTexts(const ModelInfo& info, std::span<const std::vector<int32_t>> texts) {
  if (texts.empty()) return Invalid("texts: expected at least 1, got 0");
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto count = static_cast<int64_t>(texts[i].size());
    if (count < 1 || count > info.max_positions) {
      return Invalid(fmt::format("text {}: expected 1..{} tokens (the context), got {}", i,
                                 info.max_positions, count));
    }
    for (const int32_t token : texts[i]) {
      if (token >= 0 && token < info.vocab_size) continue;
      return Invalid(
          fmt::format("text {}: token {}, expected 0..{}", i, token, info.vocab_size - 1));
    }
  }
  return {};
}

/// The selections of the tokens of one text.
class TextRouting final : public RoutingObserver {
 public:
  void Add(int64_t layer, std::span<const int32_t> ids) override {
    std::vector<int32_t>& all = ids_[layer];
    all.insert(all.end(), ids.begin(), ids.end());
  }

  /// Adds the selections of `tokens` tokens. Errors: kUnsupported if a layer did not tell them.
  Status Count(const Model& model, int64_t tokens, RoutingFrequencies* frequencies) const {
    for (RoutingFrequencies::Layer& layer : frequencies->layers) {
      const auto found = ids_.find(layer.layer);
      if (found == ids_.end() ||
          static_cast<int64_t>(found->second.size()) != tokens * frequencies->top_k) {
        return Status(Code::kUnsupported,
                      fmt::format("{}: routes inside a fused operation, which does not tell the "
                                  "experts",
                                  model.device().info().name));
      }
      for (const int32_t id : found->second) ++layer.counts[static_cast<size_t>(id)];
    }
    frequencies->tokens += tokens;
    return {};
  }

  /// The selections of a token.
  TokenRouting TokenAt(int64_t token, int64_t top_k) const {
    TokenRouting routing;
    for (const auto& [layer, ids] : ids_) {
      const auto first = ids.begin() + token * top_k;
      routing.push_back({layer, {first, first + top_k}});
    }
    return routing;
  }

 private:
  std::map<int64_t, std::vector<int32_t>> ids_;  ///< By layer: [tokens, top_k].
};

Status RunText(const Model& model, const std::vector<int32_t>& tokens, TextRouting* routing) {
  MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model.NewSequence({.truncatable = false}));
  const SequenceInput input{&sequence, tokens, false};
  std::vector<float> logits(static_cast<size_t>(model.info().vocab_size));
  Wanted wanted;
  wanted.logits = {logits.data(), DType::kF32, {1, model.info().vocab_size}};
  wanted.routing = routing;
  return RunForward(Internals::Impl(model), {&input, 1}, wanted);
}

Result<RoutingFrequencies> CountTexts(const Model& model,
                                      std::span<const std::vector<int32_t>> texts,
                                      const RoutingOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckTexts(model.info(), texts));
  RoutingFrequencies frequencies = NoSelections(Internals::Impl(model));
  if (frequencies.layers.empty()) {
    return Invalid(fmt::format("model: {} has no experts", model.info().model_type));
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto tokens = static_cast<int64_t>(texts[i].size());
    TextRouting routing;
    MARLIN_RETURN_IF_ERROR(RunText(model, texts[i], &routing));
    MARLIN_RETURN_IF_ERROR(routing.Count(model, tokens, &frequencies));
    for (int64_t token = 0; options.trace && token < tokens; ++token) {
      MARLIN_RETURN_IF_ERROR(options.trace(routing.TokenAt(token, frequencies.top_k)));
    }
    if (options.progress) {
      options.progress(static_cast<int64_t>(i) + 1, static_cast<int64_t>(texts.size()));
    }
  }
  return frequencies;
}

}  // namespace

Result<RoutingFrequencies> CountRouting(const Model& model,
                                        std::span<const std::vector<int32_t>> texts,
                                        const RoutingOptions& options) {
  try {
    return CountTexts(model, texts, options);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "routing: cannot allocate");
  }
}

}  // namespace marlin
