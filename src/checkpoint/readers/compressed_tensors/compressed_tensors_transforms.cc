#include "checkpoint/readers/compressed_tensors/compressed_tensors_transforms.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/macros.h"
#include "base/printable.h"
#include "base/view_checks.h"
#include "layout/input_transform.h"
#include "marlin/recipe.h"
#include "recipe/regex.h"

namespace marlin {
namespace {

std::string TextOr(const Json& json, std::string_view key, const std::string& other) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : other;
}

/// A list of names, or one name.
std::vector<std::string> NamesOf(const Json& json, std::string_view key) {
  const auto found = json.find(key);
  std::vector<std::string> names;
  if (found == json.end()) return names;
  if (found->is_string()) names.push_back(found->get<std::string>());
  if (!found->is_array()) return names;
  for (const Json& name : *found) {
    if (name.is_string()) names.push_back(name.get<std::string>());
  }
  return names;
}

}  // namespace

bool MatchesTarget(const std::string& target, const std::string& base) {
  if (target == base || target == "Linear") return true;
  if (!target.starts_with("re:")) return false;
  const Result<Regex> regex = Regex::Compile("^(?:" + target.substr(3) + ")");
  return regex.ok() && regex->Search(base);
}

Result<CtTransforms> CtTransforms::Parse(const Json& config, const std::string& where) {
  CtTransforms transforms;
  transforms.where_ = where + ": transform_config";
  const auto found = config.find("transform_config");
  if (found == config.end() || found->is_null() || found->empty()) return transforms;
  const auto malformed = [&](const std::string& what) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: {} is no object", transforms.where_, what));
  };
  if (!found->is_object()) return malformed("it");
  const auto groups = found->find("config_groups");
  if (groups == found->end()) return transforms;
  if (!groups->is_object()) return malformed("config_groups");
  for (const auto& [name, scheme] : groups->items()) {
    if (!scheme.is_object()) return malformed(fmt::format("\"{}\"", Printable(name)));
    MARLIN_RETURN_IF_ERROR(transforms.AddScheme(name, scheme));
  }
  return transforms;
}

Status CtTransforms::AddScheme(const std::string& name, const Json& scheme) {
  const auto fail = [&](Code code, const std::string& why) {
    return Status(code, fmt::format("{}: \"{}\": {}", where_, Printable(name), why));
  };
  const std::string type = TextOr(scheme, "type", "");
  const auto flag = scheme.find("randomize");
  const bool randomized = flag != scheme.end() && flag->is_boolean() && flag->get<bool>();
  int64_t head_dim = 0;
  if (const auto size = scheme.find("head_dim"); size != scheme.end() && !size->is_null()) {
    if (!size->is_number_unsigned() || *size < 1 || *size > kMaxHadamard) {
      return fail(Code::kMalformedFile, "head_dim is no size");
    }
    head_dim = size->get<int64_t>();
  }
  const auto apply = scheme.find("apply");
  if (apply == scheme.end() || !apply->is_array()) return {};
  bool queries = false;
  bool keys = false;
  for (const Json& entry : *apply) {
    if (!entry.is_object()) return fail(Code::kMalformedFile, "an entry of apply is no object");
    const std::string location = TextOr(entry, "location", "");
    suffixes_.push_back(fmt::format(".{}_{}.weight", name, location));
    suffixes_.push_back(fmt::format(".{}_{}.perm", name, location));
    if (location == "weight_input" || location == "weight_output") continue;
    queries |= location == "q_attn";
    keys |= location == "k_cache";
    if (location == "q_attn" || location == "k_cache") continue;
    if (location != "input") {
      return fail(Code::kUnsupported,
                  fmt::format("location \"{}\" is not supported; supported: input, weight_input, "
                              "weight_output, q_attn with k_cache",
                              Printable(location)));
    }
    if (type != "hadamard" || randomized) {
      return fail(Code::kUnsupported,
                  fmt::format("inputs rotated by type \"{}\"{} are not supported; supported: "
                              "hadamard",
                              Printable(type), randomized ? ", randomized," : ""));
    }
    inputs_.push_back({NamesOf(entry, "targets"), NamesOf(entry, "ignore"), head_dim});
  }
  if (queries == keys) return {};
  return fail(Code::kUnsupported, "q_attn and k_cache do not cancel: one of them is missing");
}

bool CtTransforms::Names(const Input& input, const std::string& base) const {
  const auto matches = [&](const std::string& target) { return MatchesTarget(target, base); };
  return std::any_of(input.targets.begin(), input.targets.end(), matches) &&
         std::none_of(input.ignored.begin(), input.ignored.end(), matches);
}

Result<int64_t> CtTransforms::HadamardOf(const std::string& base, int64_t k) const {
  int64_t size = 0;
  for (const Input& input : inputs_) {
    if (!Names(input, base)) continue;
    const auto fail = [&](const std::string& why) {
      return Status(Code::kUnsupported,
                    fmt::format("{}: module \"{}\": {}", where_, Printable(base), why));
    };
    if (size != 0) return fail("its inputs are rotated twice");
    size = input.head_dim > 0 ? input.head_dim : k;
    if (!IsHadamardSize(size) || k % size != 0) {
      return fail(fmt::format("Hadamard blocks of {} for {} inputs are not supported", size, k));
    }
  }
  return size;
}

bool CtTransforms::IsMatrix(const std::string& name) const {
  return std::any_of(suffixes_.begin(), suffixes_.end(),
                     [&](const std::string& suffix) { return name.ends_with(suffix); });
}

Status CtTransforms::DropMatrices(TensorStore* store) const {
  std::vector<size_t> matrices;
  for (size_t i = 0; i < store->tensors.size() && !suffixes_.empty(); ++i) {
    if (IsMatrix(store->tensors[i].name)) matrices.push_back(i);
  }
  return matrices.empty() ? Status() : ReplaceTensors(matrices, {}, store);
}

Status CtTransforms::CheckPlain(const TensorStore& store) const {
  constexpr std::string_view kWeight = ".weight";
  for (const TensorInfo& tensor : store.tensors) {
    if (inputs_.empty()) return {};
    const LayerClass layer = ClassifyTensor(tensor.name);
    const bool linear = tensor.shape.rank() == 2 && tensor.name.ends_with(kWeight) &&
                        IsFloat(tensor.dtype) && layer != LayerClass::kEmbedding &&
                        layer != LayerClass::kNorm;
    if (!linear) continue;
    const std::string base = tensor.name.substr(0, tensor.name.size() - kWeight.size());
    const bool rotated = std::any_of(inputs_.begin(), inputs_.end(),
                                     [&](const Input& input) { return Names(input, base); });
    if (!rotated) continue;
    return Status(Code::kUnsupported,
                  fmt::format("{}: module \"{}\": is not quantized, but its inputs are rotated",
                              where_, Printable(base)));
  }
  return {};
}

}  // namespace marlin
