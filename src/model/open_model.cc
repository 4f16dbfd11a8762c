#include "model/open_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>

#include "base/checked.h"
#include "base/function_ref.h"
#include "base/macros.h"
#include "base/path_check.h"
#include "base/printable.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/files/model_directory.h"
#include "checkpoint/module_reader.h"
#include "layout/input_transform.h"
#include "ops/device/device.h"
#include "ops/gemm/prepare_columns.h"
#include "recipe/decoder_tensors.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

/// A file next to the weights or within them; empty if it does not exist.
Result<std::string> ReadBeside(const Checkpoint& checkpoint, const char* name) {
  MARLIN_ASSIGN_OR_RETURN(std::optional<std::string> text, checkpoint.ReadFile(name));
  return text ? *std::move(text) : std::string();
}

/// Files within a container hold in config.json what their tokenizer says.
Result<GenerationFiles> ReadGenerationFiles(const Checkpoint& checkpoint, bool whole) {
  GenerationFiles files;
  MARLIN_ASSIGN_OR_RETURN(files.generation_config,
                          ReadBeside(checkpoint, "generation_config.json"));
  if (whole) return files;
  MARLIN_ASSIGN_OR_RETURN(files.tokenizer_config, ReadBeside(checkpoint, "tokenizer_config.json"));
  if (files.tokenizer_config.empty()) return files;
  MARLIN_ASSIGN_OR_RETURN(files.tokenizer, ReadBeside(checkpoint, "tokenizer.json"));
  return files;
}

Status CheckIsModel(const std::string& path) {
  std::error_code error;
  const std::filesystem::path directory(path);
  if (!std::filesystem::exists(directory, error)) {
    return Status(Code::kIo, fmt::format("{}: no such directory", path));
  }
  if (!std::filesystem::is_directory(directory, error)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: a model is a directory with a config.json", path));
  }
  const bool adapter = std::filesystem::exists(directory / "adapter_config.json", error);
  if (!std::filesystem::exists(directory / "config.json", error)) {
    return adapter ? Status(Code::kUnsupported,
                            fmt::format("{}: an adapter, not a model; merge it into its base "
                                        "model first",
                                        path))
                   : Status(Code::kIo, fmt::format("{}: config.json is missing", path));
  }
  return {};
}

}  // namespace

Result<ModelDirectory> OpenModelDirectory(const std::string& path,
                                          const CheckpointOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckPath(path));
  Result<Checkpoint> opened = Checkpoint::Open(path, options);
  // Containers other than safetensors embed their config.
  const bool whole =
      opened.ok() ? CheckpointAccess::Get(*opened).in_container : IsOtherContainer(path);
  if (!whole) MARLIN_RETURN_IF_ERROR(CheckIsModel(path));
  MARLIN_ASSIGN_OR_RETURN(Checkpoint checkpoint, std::move(opened));
  if (checkpoint.config_json().empty()) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: does not say which architecture it has", Printable(path)));
  }
  MARLIN_ASSIGN_OR_RETURN(const GenerationFiles files, ReadGenerationFiles(checkpoint, whole));
  Result<DecoderConfig> config = ReadDecoderConfig(checkpoint.config_json(), files);
  if (!config.ok()) return config.status().WithContext(path);
  const std::vector<std::string>& notes = checkpoint.notes();
  config->notes.insert(config->notes.begin(), notes.begin(), notes.end());
  return ModelDirectory{std::move(checkpoint), *std::move(config)};
}

int64_t DeviceBytes(const TensorInfo& tensor) {
  const int64_t element = std::min<int64_t>(DTypeBytes(tensor.dtype), 2);
  return (Checked(tensor.shape.ElementCount()) * Checked(element)).Take().value_or(INT64_MAX);
}

namespace {

/// Tells the name and the bytes on a device of every weight of a model.
void ForEachWeight(const Checkpoint& checkpoint, const Device& device,
                   FunctionRef<void(const std::string& name, Checked bytes)> tell) {
  for (const QuantizedModule& module : checkpoint.modules()) {
    if (!OtherPart(module.name).empty()) continue;
    // Experts are loaded in the order of k.
    const bool expert = module.layer_class == LayerClass::kMoeExpert ||
                        module.layer_class == LayerClass::kMoeSharedExpert;
    const bool folded = expert && TransformsInput(module.spec);
    const WeightsSpec spec = folded ? FoldedSpec(module.spec) : module.spec;
    tell(module.name, Checked(PreparedBytes(spec, device)));
  }
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (checkpoint.IsModulePart(tensor.name) || !OtherPart(tensor.name).empty()) continue;
    tell(tensor.name, Checked(DeviceBytes(tensor)));
  }
}

/// The layer of a weight; -1: none.
int64_t LayerOf(std::string_view name, int64_t layers) {
  const std::string first = LayerPrefix(0);
  const std::string_view before = std::string_view(first).substr(0, first.size() - 2);
  if (!name.starts_with(before)) return -1;
  name.remove_prefix(before.size());
  int64_t layer = -1;
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), layer);
  return parsed.ec == std::errc() && layer < layers ? layer : -1;
}

}  // namespace

int64_t WeightBytes(const Checkpoint& checkpoint, const Device& device) {
  Checked bytes(0);
  ForEachWeight(checkpoint, device,
                [&](const std::string&, Checked more) { bytes = bytes + more; });
  return bytes.Take().value_or(INT64_MAX);
}

WeightSizes SizeWeights(const ModelDirectory& model, const Device& device) {
  const Dimensions& shape = model.config.shape;
  WeightSizes sizes;
  sizes.layers.resize(static_cast<size_t>(shape.layers));
  // A quantized table's module has no ".weight".
  const auto is_of = [](std::string_view name, std::string_view tensor) {
    return name.starts_with(tensor.substr(0, tensor.rfind('.')));
  };
  ForEachWeight(model.checkpoint, device, [&](const std::string& name, Checked more) {
    const int64_t layer = LayerOf(name, shape.layers);
    int64_t* sum = &sizes.others;
    if (layer >= 0) sum = &sizes.layers[static_cast<size_t>(layer)];
    // The second table's name begins with the first one's.
    if (is_of(name, kEmbeddingTensor)) sum = shape.tied ? &sizes.others : &sizes.tables;
    if (is_of(name, kLayerTableTensor)) sum = &sizes.tables;
    *sum = (Checked(*sum) + more).Take().value_or(INT64_MAX);
  });
  return sizes;
}

int64_t WeightSizes::From(int64_t first) const {
  Checked bytes(others);
  if (first == 0) bytes = bytes + Checked(tables);
  for (size_t layer = static_cast<size_t>(first); layer < layers.size(); ++layer) {
    bytes = bytes + Checked(layers[layer]);
  }
  return bytes.Take().value_or(INT64_MAX);
}

int64_t MemoryOf(const Device& device, int64_t limit) {
  const int64_t free = Internals::Impl(device).backend().free_memory();
  return limit == 0 ? free : std::min(limit, free);
}

std::string DescribeMemory(const Device& device, int64_t limit) {
  return fmt::format("{} has {}{}", device.info().name, MemoryOf(device, limit),
                     limit == 0 ? " free" : " for it");
}

Result<int64_t> BytesForCache(const Checkpoint& checkpoint, const Device& device, int64_t limit,
                              int64_t elsewhere, int64_t more) {
  const int64_t available = MemoryOf(device, limit);
  if (available == 0) return INT64_MAX;
  const int64_t weights = WeightBytes(checkpoint, device) - elsewhere + more;
  if (weights < available) return available - weights;
  return Status(Code::kOutOfMemory,
                fmt::format("{}: its weights take {} bytes, {}", Printable(checkpoint.path()),
                            weights, DescribeMemory(device, limit)));
}

std::string PreparedSource(const Checkpoint& checkpoint) {
  return Fingerprint(CheckpointAccess::Get(checkpoint), "prepare");
}

Result<std::shared_ptr<const PreparedFile>> OpenPrepared(const std::string& file,
                                                         const Checkpoint& checkpoint,
                                                         const Device& device) {
  SystemIo io;
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const PreparedFile> prepared,
                          PreparedFile::Open(io, file));
  MARLIN_ASSIGN_OR_RETURN(const std::string layout, ImageLayout(device));
  const auto refuse = [&](const std::string& why) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {}: prepare them again", Printable(file), why));
  };
  if (prepared->layout() != layout) {
    return refuse(fmt::format("weights in the layout {}, this device reads {}",
                              Printable(prepared->layout()), layout));
  }
  const std::string source = PreparedSource(checkpoint);
  if (prepared->source() != source) {
    return refuse(fmt::format("weights of model {}, {} is {} (another, or changed since)",
                              Printable(prepared->source()), Printable(checkpoint.path()), source));
  }
  return prepared;
}

}  // namespace marlin
