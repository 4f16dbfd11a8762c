// Which experts the tokens of a text select: traces and frequencies.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/model.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The experts that a token selects in a layer, best first.
struct LayerRouting {
  int64_t layer = 0;
  std::vector<int32_t> experts;

  friend bool operator==(const LayerRouting&, const LayerRouting&) = default;
};

/// The selections of a token in all layers with experts, in ascending order of the layers.
using TokenRouting = std::vector<LayerRouting>;

/// The line of a trace for a token, without its end: {"layers":[{"layer":1,"experts":[5,0]}]}. A
/// trace is a text file with one line per token.
std::string RoutingTraceLine(const TokenRouting& token);

/// Calls visit for every line of a trace, in order, until it fails. Errors: kIo, kMalformedFile
/// naming path and line; visit's.
Status ReadRoutingTrace(const std::string& path,
                        const std::function<Status(const TokenRouting&)>& visit);

/// How often the tokens of a text select each expert of a model.
struct RoutingFrequencies {
  struct Layer {
    int64_t layer = 0;
    std::vector<int64_t> counts;  ///< By expert; they sum to tokens * top_k.

    friend bool operator==(const Layer&, const Layer&) = default;
  };
  std::string model_type;  ///< "qwen3_moe"
  int64_t tokens = 0;
  int64_t top_k = 0;
  std::vector<Layer> layers;  ///< Those with experts, in ascending order.

  /// {"model_type", "tokens", "top_k", "layers": [{"layer", "counts": [...]}]}.
  std::string ToJson() const;
  /// Errors: kMalformedFile naming `file` and the key that is missing or has a wrong value.
  static Result<RoutingFrequencies> FromJson(std::string_view text, const std::string& file);
  /// Errors: kIo, and as FromJson.
  static Result<RoutingFrequencies> FromFile(const std::string& path);

  friend bool operator==(const RoutingFrequencies&, const RoutingFrequencies&) = default;
};

/// Options of CountRouting.
struct RoutingOptions {
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< In texts.
  std::function<Status(const TokenRouting&)> trace = {};           ///< Called for every token.
};

/// Runs a model over tokenized texts, each a sequence of its own, and counts the selections of its
/// experts. Errors: kInvalidArgument for a model without experts, no text, an empty text or one
/// longer than the model's context, a token id out of range; kUnsupported on a device that routes
/// inside a fused operation; the model's and options.trace's.
Result<RoutingFrequencies> CountRouting(const Model& model,
                                        std::span<const std::vector<int32_t>> texts,
                                        const RoutingOptions& options = {});

}  // namespace marlin
#pragma GCC visibility pop
