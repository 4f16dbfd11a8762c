#include "checkpoint/decoder_names.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/module_names.h"
#include "checkpoint/module_tensors.h"
#include "recipe/decoder_tensors.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kHeadPrefix = "lm_head.";
constexpr std::string_view kTablePrefix = "model.embed_tokens.";
constexpr std::string_view kOwnPrefixes[] = {"model.layers.",
                                             "model.norm.",
                                             "model.embedding_norm.",
                                             "model.embed_tokens_per_layer.",
                                             "model.per_layer_",
                                             kTablePrefix,
                                             kHeadPrefix};

/// Last parts of names, after "model.layers.0.self_attn.", of tensors that a decoder's results do
/// not depend on: scales and zero points of a quantized KV cache, under the names of the programs
/// that write them, and RoPE frequencies.
constexpr std::string_view kUnusedSuffixes[] = {
    ".kv_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".prob_output_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".q_zero_point",
    ".kv_cache_scale",
    ".kv_cache_scaling_factor",
    ".k_cache_scale",
    ".v_cache_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
    ".q_proj.output_scale",
    ".qkv_proj.output_scale",
    ".k_bmm_quantizer._amax",
    ".v_bmm_quantizer._amax",
    ".q_bmm_quantizer._amax",
    ".k_bmm_quantizer._scale",
    ".v_bmm_quantizer._scale",
    ".q_bmm_quantizer._scale",
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
};

bool IsOwn(std::string_view name) {
  return std::any_of(std::begin(kOwnPrefixes), std::end(kOwnPrefixes),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

bool IsUnused(std::string_view name) {
  return std::any_of(std::begin(kUnusedSuffixes), std::end(kUnusedSuffixes),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

bool IsOwnDirectory(const Json& config) {
  const auto found = config.find("quantization_config");
  return found != config.end() && found->is_object() && found->contains("quant_method") &&
         (*found)["quant_method"] == kQuantMethod;
}

/// The names of the modules of a directory of this project. What is malformed, its reader reports.
std::set<std::string> ModuleNames(const Json& config) {
  std::set<std::string> names;
  const Json& quantization = config["quantization_config"];
  const auto modules = quantization.find("modules");
  if (modules == quantization.end() || !modules->is_object()) return names;
  for (const auto& [name, module] : modules->items()) names.insert(name);
  return names;
}

class DecoderNamer {
 public:
  DecoderNamer(bool own, TensorStore* store)
      : own_(own),
        store_(*store),
        modules_(own ? ModuleNames(store->config()) : std::set<std::string>()) {}

  /// Takes the text model's tensors out of the module that a multimodal checkpoint has it in, and
  /// notes the other parts. Names in both forms mean what they say.
  Status TakeTextModel(const std::string& type) {
    std::map<std::string_view, int64_t> others;
    bool plain = false;
    for (const TensorInfo& tensor : store_.tensors) {
      const std::string_view part = OtherPart(tensor.name);
      if (!part.empty()) {
        ++others[part];
        continue;
      }
      const std::string_view prefix = TextTensorPrefix(tensor.name);
      plain = plain || (prefix.empty() && tensor.name.starts_with(kModelPrefix));
      if (!prefix.empty()) AddPrefix(prefix);
    }
    std::string names;
    for (const auto& [part, count] : others) {
      names += fmt::format("{}{} ({} tensors)", names.empty() ? "" : ", ",
                           Printable(std::string(part)), count);
    }
    store_.notes.push_back(
        fmt::format("only the text model of a {} is run{}{}", Printable(type),
                    names.empty() ? "" : "; other parts are kept as they are: ", names));
    if (plain) store_.text_prefixes.clear();
    return RenameByPrefix();
  }

  /// Gives tensors the names that they have here instead of the family's.
  Status TakePrefixes(std::span<const NamePrefix> prefixes) {
    for (const NamePrefix& prefix : prefixes) {
      const bool used = std::any_of(
          store_.tensors.begin(), store_.tensors.end(),
          [&](const TensorInfo& tensor) { return tensor.name.starts_with(prefix.stored); });
      if (used) store_.text_prefixes.emplace_back(prefix.stored, prefix.meant);
    }
    return RenameByPrefix();
  }

  /// Gives all tensors their full names, unless one of them is taken: names then mean what they
  /// say.
  Status Rename() {
    for (const std::string& module : modules_) {
      if (const std::string name = FullDecoderName(module); name != module && IsTaken(name)) {
        return {};
      }
    }
    std::string example;
    for (TensorInfo& tensor : store_.tensors) {
      std::string name = FullDecoderName(tensor.name);
      if (name == tensor.name) continue;
      if (IsTaken(name)) return Forget();
      if (example.empty()) example = fmt::format("{} as {}", tensor.name, name);
      renames_.push_back(std::move(name));
      renamed_.push_back(&tensor);
    }
    if (example.empty()) return {};
    store_.full_names = true;
    store_.notes.push_back("tensors are named as in a base model: read " + example + ", ...");
    return ApplyRenames();
  }

  /// Cuts stacks of experts as mlx-lm stores them, [experts, n, k], into one matrix per expert.
  Status SplitStacks(const ExpertStyle& style) {
    std::vector<TensorInfo> matrices;
    std::string example;
    for (TensorInfo& tensor : store_.tensors) {
      const std::string name = StackName(style, tensor);
      if (name.empty()) continue;
      if (example.empty()) example = fmt::format("{} as {}", tensor.name, name);
      const int64_t experts = tensor.shape[0];
      if (static_cast<int64_t>(matrices.size()) + experts > kMaxTensorCount) {
        return Status(Code::kMalformedFile,
                      fmt::format("{}: tensor \"{}\": stacks {} matrices", Printable(store_.path),
                                  Printable(tensor.name), experts));
      }
      TensorInfo matrix = tensor;
      matrix.shape = {tensor.shape[1], tensor.shape[2]};
      matrix.bytes = tensor.bytes / experts;
      const size_t star = name.find('*');
      for (int64_t e = 0; e < experts; ++e) {
        matrix.name = fmt::format("{}{}{}", name.substr(0, star), e, name.substr(star + 1));
        matrix.offset = tensor.offset + e * matrix.bytes;
        matrices.push_back(matrix);
      }
      tensor.name.clear();  // To be dropped.
    }
    if (example.empty()) return {};
    store_.notes.push_back("experts are stacked as mlx-lm stacks them: read " + example + ", ...");
    store_.tensors.insert(store_.tensors.end(), matrices.begin(), matrices.end());
    return Drop([](const TensorInfo& tensor) { return tensor.name.empty(); });
  }

  Status Drop(const std::function<bool(const TensorInfo&)>& unwanted) {
    std::vector<TensorInfo>& tensors = store_.tensors;
    const auto kept = std::remove_if(tensors.begin(), tensors.end(), unwanted);
    if (kept == tensors.end()) return {};
    tensors.erase(kept, tensors.end());
    return Sort();
  }

  /// Precondition: the config ties the head.
  Status Tie() {
    const std::vector<size_t> head = WithPrefix(kHeadPrefix);
    const std::vector<size_t> table = WithPrefix(kTablePrefix);
    if (head.empty()) return {};
    if (table.empty()) {
      if (own_) return {};
      for (const size_t i : head) {
        TensorInfo& tensor = store_.tensors[i];
        renames_.push_back(std::string(kTablePrefix) + tensor.name.substr(kHeadPrefix.size()));
        renamed_.push_back(&tensor);
      }
      store_.notes.push_back(
          "tie_word_embeddings is true and there is no model.embed_tokens: lm_head is both");
      return ApplyRenames();
    }
    if (AreEqual(head, table)) {
      return Drop([](const TensorInfo& tensor) { return tensor.name.starts_with(kHeadPrefix); });
    }
    Json config = store_.config();
    UntieTextConfig(&config);
    store_.notes.push_back(
        "tie_word_embeddings is true, but lm_head differs from model.embed_tokens: both are used "
        "as they are, and tie_word_embeddings is taken for false");
    return store_.SetConfig(DumpJson(config, 2) + "\n", store_.path);
  }

 private:
  Status RenameByPrefix() {
    if (store_.text_prefixes.empty()) return {};
    for (TensorInfo& tensor : store_.tensors) tensor.name = DecoderName(store_, tensor.name);
    std::set<std::string> modules;
    for (const std::string& module : modules_) modules.insert(DecoderName(store_, module));
    modules_ = std::move(modules);
    return Sort();
  }

  void AddPrefix(std::string_view stored) {
    auto& prefixes = store_.text_prefixes;
    const bool known = std::any_of(prefixes.begin(), prefixes.end(),
                                   [&](const auto& pair) { return pair.first == stored; });
    if (!known) prefixes.emplace_back(stored, TextTensorName(stored));
  }
  Status ApplyRenames() {
    for (size_t i = 0; i < renamed_.size(); ++i) renamed_[i]->name = std::move(renames_[i]);
    renamed_.clear();
    renames_.clear();
    return Sort();
  }
  Status Sort() {
    store_.tensor_file.clear();
    return SortTensors(&store_);
  }

  /// The name of the matrices in a stack of floats, "*" for the expert; empty: it is none. Stacks
  /// of codes are modules.
  std::string StackName(const ExpertStyle& style, const TensorInfo& tensor) const {
    const bool floats =
        tensor.dtype == DType::kF16 || tensor.dtype == DType::kBf16 || tensor.dtype == DType::kF32;
    if (!floats || tensor.shape.rank() != 3 || tensor.bytes == 0) return {};
    if (!tensor.name.ends_with(kWeightSuffix)) return {};
    const std::string base = tensor.name.substr(0, tensor.name.size() - kWeightSuffix.size());
    const std::string name =
        ExpertNameInStyle(style, PlainWeightName(Producer::kMlx, base, /*stacked=*/true));
    return name.find(".experts.*.") == std::string::npos ? std::string() : name;
  }

  std::vector<size_t> WithPrefix(std::string_view prefix) const {
    std::vector<size_t> found;
    for (size_t i = 0; i < store_.tensors.size(); ++i) {
      if (store_.tensors[i].name.starts_with(prefix)) found.push_back(i);
    }
    return found;
  }

  /// Whether two modules have equal tensors. Both are sorted by name.
  bool AreEqual(const std::vector<size_t>& head, const std::vector<size_t>& table) const {
    if (head.size() != table.size() || (own_ && head.size() != 1)) return false;
    for (size_t i = 0; i < head.size(); ++i) {
      const TensorInfo& a = store_.tensors[head[i]];
      const TensorInfo& b = store_.tensors[table[i]];
      if (a.name.substr(kHeadPrefix.size()) != b.name.substr(kTablePrefix.size()) ||
          a.dtype != b.dtype || !(a.shape == b.shape) || a.bytes != b.bytes ||
          std::memcmp(store_.Data(head[i]), store_.Data(table[i]), static_cast<size_t>(a.bytes)) !=
              0) {
        return false;
      }
    }
    return true;
  }

  bool IsTaken(const std::string& name) const {
    return store_.FindTensor(name).has_value() || modules_.contains(name);
  }
  Status Forget() {
    renamed_.clear();
    renames_.clear();
    return {};
  }

  const bool own_;
  TensorStore& store_;
  std::set<std::string> modules_;  ///< Names of the modules of a directory of this project.
  std::vector<TensorInfo*> renamed_;
  std::vector<std::string> renames_;
};

}  // namespace

std::string FullDecoderName(std::string_view name) {
  std::string longer = std::string(kModelPrefix).append(name);
  if (!IsOwn(name) && IsOwn(longer)) return longer;
  if (name.starts_with(kModelPrefix) && IsOwn(name.substr(kModelPrefix.size()))) {
    name.remove_prefix(kModelPrefix.size());
  }
  return std::string(name);
}

std::string DecoderName(const TensorStore& store, std::string_view name) {
  if (OtherPart(name).empty()) {
    for (const auto& [stored, meant] : store.text_prefixes) {
      if (name.starts_with(stored)) return meant + std::string(name.substr(stored.size()));
    }
  }
  return store.full_names ? FullDecoderName(name) : std::string(name);
}

std::string StoredName(const TensorStore& store, std::string_view name) {
  if (OtherPart(name).empty()) {
    for (const auto& [stored, meant] : store.text_prefixes) {
      if (name.starts_with(meant)) return stored + std::string(name.substr(meant.size()));
    }
  }
  return std::string(name);
}

Status NameDecoderTensors(TensorStore* store) {
  const Json& config = store->config();
  if (!config.is_object()) return {};
  const Result<const Family*> family = FindFamily(TextModelType(config));
  if (!family.ok()) return {};
  const bool own = IsOwnDirectory(config);
  DecoderNamer namer(own, store);
  MARLIN_RETURN_IF_ERROR(
      namer.Drop([](const TensorInfo& tensor) { return IsUnused(tensor.name); }));
  if (IsMultimodal(config)) MARLIN_RETURN_IF_ERROR(namer.TakeTextModel(config["model_type"]));
  if (!(*family)->prefixes.empty()) {
    MARLIN_RETURN_IF_ERROR(namer.TakePrefixes((*family)->prefixes));
  }
  MARLIN_RETURN_IF_ERROR(namer.Rename());
  const ExpertStyle* const experts = (*family)->experts;
  if (!own && experts != nullptr && !experts->stacked) {
    MARLIN_RETURN_IF_ERROR(namer.SplitStacks(*experts));
  }
  return TiesEmbeddings(config) ? namer.Tie() : Status();
}

}  // namespace marlin
