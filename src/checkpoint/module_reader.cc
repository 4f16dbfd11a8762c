#include "checkpoint/module_reader.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "checkpoint/files/file_names.h"
#include "checkpoint/files/model_directory.h"

namespace marlin {

#define MARLIN_CONTAINER(suffix, magic, open) OpenReader open;
#define MARLIN_QUANT_METHOD(name, open) OpenReader open;
#include "checkpoint/readers.def"
#undef MARLIN_CONTAINER
#undef MARLIN_QUANT_METHOD

namespace {

constexpr Container kContainers[] = {
#define MARLIN_CONTAINER(suffix, magic, open) {suffix, magic, &open},
#define MARLIN_QUANT_METHOD(name, open)
#include "checkpoint/readers.def"
#undef MARLIN_CONTAINER
#undef MARLIN_QUANT_METHOD
};

struct Method {
  std::string_view name;
  OpenReader* open;
};
constexpr Method kMethods[] = {
#define MARLIN_CONTAINER(suffix, magic, open)
#define MARLIN_QUANT_METHOD(name, open) {name, &open},
#include "checkpoint/readers.def"
#undef MARLIN_CONTAINER
#undef MARLIN_QUANT_METHOD
};

// Where writers record the quantization method, most specific first. An entry without a
// quant_method implies the method of the writer that introduced it.
struct MethodPlace {
  std::string_view file;
  std::string_view key;      // Empty: the whole document.
  std::string_view implied;  // Empty: the place must name its method.
};
constexpr std::string_view kPlainSuffix = ".safetensors";
constexpr std::array<MethodPlace, 6> kPlaces = {{
    {kConfigFile, "quantization_config", ""},
    {kConfigFile, "compression_config", "compressed-tensors"},
    {kConfigFile, "quantization", "mlx"},
    {"hf_quant_config.json", "", "modelopt"},
    {"quantize_config.json", "", "gptq"},
    {"quant_config.json", "", "awq"},
}};

Result<QuantMethod> NameMethod(std::shared_ptr<const Json> document, const MethodPlace& place,
                               std::string where) {
  const Json& config = *document;
  QuantMethod method;
  method.where = std::move(where);
  if (!config.is_object()) {
    return Status(Code::kMalformedFile, fmt::format("{}: expected an object, got {}", method.where,
                                                    DescribeJson(config)));
  }
  method.config = std::move(document);
  const auto name = config.find("quant_method");
  if (name == config.end()) {
    method.name = place.implied;
    // bitsandbytes wrote these before quant_method existed.
    if (config.contains("load_in_4bit") || config.contains("load_in_8bit")) {
      method.name = "bitsandbytes";
    }
    return method;
  }
  if (!name->is_string()) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: \"quant_method\": expected a string, got {}", method.where,
                              DescribeJson(*name)));
  }
  method.name = name->get_ref<const std::string&>();
  return method;
}

std::string KnownMethods() {
  std::string known;
  for (const Method& method : kMethods) {
    known += known.empty() ? "" : ", ";
    known += method.name;
  }
  return known;
}

Status UnnamedMethod(const std::string& where) {
  return Status(Code::kUnsupported,
                fmt::format("{}: names no \"quant_method\"; supported: {}", where, KnownMethods()));
}

/// The first entry of a parsed config.json that names a method.
Result<QuantMethod> FindInConfig(const Json& config, const std::string& path) {
  std::string unnamed;
  for (const MethodPlace& place : kPlaces) {
    if (place.file != kConfigFile) continue;
    const auto found = config.find(place.key);
    if (found == config.end() || found->is_null()) continue;
    const std::string where = fmt::format("{}: {}", Printable(path), place.key);
    // Shares ownership with the store's config.
    std::shared_ptr<const Json> document(std::shared_ptr<const Json>(), &*found);
    MARLIN_ASSIGN_OR_RETURN(QuantMethod method, NameMethod(std::move(document), place, where));
    if (!method.name.empty()) return method;
    // MLX repeats its own entry as quantization_config, without a quant_method.
    if (unnamed.empty()) unnamed = where;
  }
  if (!unnamed.empty()) return UnnamedMethod(unnamed);
  // Multimodal models nest the config of their decoder.
  const auto text = config.find("text_config");
  if (text == config.end() || !text->is_object()) return QuantMethod();
  return FindInConfig(*text, path + ": text_config");
}

}  // namespace

std::optional<ContainedFile> ModuleReader::File(const std::string& name) const {
  for (ContainedFile& file : Files()) {
    if (file.name == name) return std::move(file);
  }
  return std::nullopt;
}

bool IsQuantizationFile(std::string_view name) {
  return std::any_of(kPlaces.begin(), kPlaces.end(), [name](const MethodPlace& place) {
    return place.file == name && place.file != kConfigFile;
  });
}

void RemoveQuantization(Json* config) {
  if (!config->is_object()) return;
  for (const MethodPlace& place : kPlaces) {
    if (place.file == kConfigFile) config->erase(std::string(place.key));
  }
}

const Container* FindContainer(std::string_view file_name) {
  for (const Container& container : kContainers) {
    if (file_name.ends_with(container.suffix)) return &container;
  }
  return nullptr;
}

bool IsOtherContainer(std::string_view file_name) {
  const Container* const container = FindContainer(file_name);
  return container != nullptr && container != FindContainer(kPlainSuffix);
}

Result<QuantMethod> FindQuantMethod(Io& io, const TensorStore& store,
                                    const std::vector<std::string>& names) {
  if (store.config().is_object()) {
    const std::string path = JoinPath(store.path, std::string(kConfigFile));
    MARLIN_ASSIGN_OR_RETURN(QuantMethod method, FindInConfig(store.config(), path));
    if (!method.name.empty()) return method;
  }
  for (const MethodPlace& place : kPlaces) {
    if (place.file == kConfigFile) continue;
    const std::string name(place.file);
    if (!std::binary_search(names.begin(), names.end(), name)) continue;
    const std::string path = JoinPath(store.path, name);
    MARLIN_RETURN_IF_ERROR(CheckModelFile(io, store.path, name));
    MARLIN_ASSIGN_OR_RETURN(const std::string text, io.ReadText(path, kCheckpointJson.bytes));
    MARLIN_ASSIGN_OR_RETURN(Json config, ParseJsonObject(text, path));
    return NameMethod(std::make_shared<const Json>(std::move(config)), place, Printable(path));
  }
  return QuantMethod();
}

Result<std::unique_ptr<const ModuleReader>> OpenModules(TensorStore& store,
                                                        const QuantMethod& method) {
  // A plain checkpoint has no method at all; an empty name is an error.
  if (method.config == nullptr) return FindContainer(kPlainSuffix)->open(store, method);
  if (method.name.empty()) return UnnamedMethod(method.where);
  for (const Method& known : kMethods) {
    if (known.name == method.name) return known.open(store, method);
  }
  return Status(Code::kUnsupported,
                fmt::format("{}: quant_method \"{}\" is not supported; supported: {}", method.where,
                            Printable(method.name), KnownMethods()));
}

}  // namespace marlin
