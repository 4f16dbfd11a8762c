// Traces and frequencies of routing as files.
#include <fmt/core.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "base/json.h"
#include "base/macros.h"
#include "base/path_check.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "marlin/routing.h"

namespace marlin {
namespace {

/// Larger numbers are no layer, and no expert.
constexpr int64_t kMostExperts = int64_t{1} << 20;
constexpr JsonLimits kTraceLine{int64_t{1} << 20, int64_t{1} << 16};
constexpr JsonLimits kFrequencyFile{int64_t{64} << 20, int64_t{1} << 22};

Status MalformedRouting(const std::string& where, std::string_view what) {
  return Status(Code::kMalformedFile, fmt::format("{}: {}", where, what));
}

/// A whole number below `limit`, or nothing.
std::optional<int64_t> NumberBelow(const Json& value, int64_t limit) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<uint64_t>();
  if (number >= static_cast<uint64_t>(limit)) return std::nullopt;
  return static_cast<int64_t>(number);
}

Result<int64_t> NumberAt(const Json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end())
    return MalformedRouting(where, fmt::format("the key '{}' is missing", key));
  if (const auto number = NumberBelow(*found, INT64_MAX)) return *number;
  return MalformedRouting(
      where, fmt::format("{}: expected a whole number, got {}", key, DescribeJson(*found)));
}

/// Reads [{"layer": ascending, `key`: [numbers]}, ...]; add(layer, numbers) takes them.
template <typename Add>
Status ReadLayers(const Json& document, const char* key, int64_t limit, const std::string& where,
                  Add add) {
  const auto layers = document.find("layers");
  if (layers == document.end() || !layers->is_array()) {
    return MalformedRouting(where, "layers: expected an array");
  }
  int64_t last = -1;
  for (const Json& entry : *layers) {
    if (!entry.is_object()) return MalformedRouting(where, "layers: expected objects");
    MARLIN_ASSIGN_OR_RETURN(const int64_t layer, NumberAt(entry, "layer", where));
    if (layer <= last || layer >= kMostExperts) {
      return MalformedRouting(where,
                              fmt::format("layer {}: expected layers in ascending order", layer));
    }
    last = layer;
    const auto list = entry.find(key);
    if (list == entry.end() || !list->is_array() || list->empty()) {
      return MalformedRouting(where, fmt::format("layer {}: {}: expected an array", layer, key));
    }
    std::vector<int64_t> numbers;
    for (const Json& value : *list) {
      const auto number = NumberBelow(value, limit);
      if (!number) {
        return MalformedRouting(
            where, fmt::format("layer {}: {}: expected whole numbers below {}, got {}", layer, key,
                               limit, DescribeJson(value)));
      }
      numbers.push_back(*number);
    }
    MARLIN_RETURN_IF_ERROR(add(layer, std::move(numbers)));
  }
  return {};
}

Result<TokenRouting> ParseTraceLine(const std::string& line, const std::string& where) {
  MARLIN_ASSIGN_OR_RETURN(const Json document, ParseJsonObject(line, where, kTraceLine));
  TokenRouting token;
  const auto add = [&](int64_t layer, const std::vector<int64_t>& experts) -> Status {
    token.push_back({layer, {experts.begin(), experts.end()}});
    return {};
  };
  MARLIN_RETURN_IF_ERROR(ReadLayers(document, "experts", kMostExperts, where, add));
  return token;
}

}  // namespace

std::string RoutingTraceLine(const TokenRouting& token) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const LayerRouting& layer : token) {
    layers.push_back({{"layer", layer.layer}, {"experts", layer.experts}});
  }
  return nlohmann::ordered_json{{"layers", std::move(layers)}}.dump();
}

Status ReadRoutingTrace(const std::string& path,
                        const std::function<Status(const TokenRouting&)>& visit) {
  MARLIN_RETURN_IF_ERROR(CheckPath(path));
  std::ifstream file(path);
  if (!file) return Status(Code::kIo, fmt::format("{}: cannot be opened", Printable(path)));
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string where = fmt::format("{}: line {}", Printable(path), ++number);
    MARLIN_ASSIGN_OR_RETURN(const TokenRouting token, ParseTraceLine(line, where));
    MARLIN_RETURN_IF_ERROR(visit(token));
  }
  if (file.bad()) return Status(Code::kIo, fmt::format("{}: cannot be read", Printable(path)));
  return {};
}

std::string RoutingFrequencies::ToJson() const {
  nlohmann::ordered_json document = {
      {"model_type", model_type}, {"tokens", tokens}, {"top_k", top_k}};
  document["layers"] = nlohmann::ordered_json::array();
  for (const Layer& layer : layers) {
    document["layers"].push_back({{"layer", layer.layer}, {"counts", layer.counts}});
  }
  return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<RoutingFrequencies> RoutingFrequencies::FromJson(std::string_view text,
                                                        const std::string& file) {
  MARLIN_ASSIGN_OR_RETURN(const Json document, ParseJsonObject(text, file, kFrequencyFile));
  RoutingFrequencies frequencies;
  const auto type = document.find("model_type");
  if (type == document.end() || !type->is_string()) {
    return MalformedRouting(file, "model_type: expected a string");
  }
  frequencies.model_type = type->get<std::string>();
  MARLIN_ASSIGN_OR_RETURN(frequencies.tokens, NumberAt(document, "tokens", file));
  MARLIN_ASSIGN_OR_RETURN(frequencies.top_k, NumberAt(document, "top_k", file));
  const int64_t selections = SaturatingProduct(frequencies.tokens, frequencies.top_k);
  const auto add = [&](int64_t layer, std::vector<int64_t> counts) -> Status {
    int64_t sum = 0;
    for (const int64_t count : counts) {
      if (__builtin_add_overflow(sum, count, &sum)) sum = INT64_MAX;
    }
    if (sum != selections) {
      return MalformedRouting(
          file, fmt::format("layer {}: counts sum to {}, expected {} (tokens * top_k)", layer, sum,
                            selections));
    }
    frequencies.layers.push_back({layer, std::move(counts)});
    return {};
  };
  MARLIN_RETURN_IF_ERROR(ReadLayers(document, "counts", INT64_MAX, file, add));
  return frequencies;
}

Result<RoutingFrequencies> RoutingFrequencies::FromFile(const std::string& path) {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kFrequencyFile.bytes));
  return FromJson(text, Printable(path));
}

}  // namespace marlin
