#include "checkpoint/module_tensors.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/codes/tiled_codes.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/files/io.h"
#include "checkpoint/files/object_reader.h"
#include "checkpoint/module_names.h"
#include "layout/input_transform.h"
#include "layout/weights_buffer.h"
#include "layout/weights_shapes.h"

namespace marlin {
namespace {

constexpr std::string_view kExpertWildcard = ".*.";

std::string_view LayoutName(SourceLayout layout) {
  return layout == SourceLayout::kOutIn ? "out_in" : "in_out";
}

/// The oldest version that holds a module: 3 for codes in tiles.
int OldestVersionOf(const ModuleRecord& record) {
  constexpr int kTiled = 3;
  return record.codes == PackedLayout::kKPacked ? OldestVersionOf(record.module.spec) : kTiled;
}

Json ModuleJson(const ModuleRecord& record, int version) {
  const WeightsSpec& spec = record.module.spec;
  // Unsigned, as the JSON parser reads them back.
  Json shape = Json::array();
  if (record.stacked) shape.push_back(static_cast<uint64_t>(spec.experts));
  shape.push_back(static_cast<uint64_t>(spec.k));
  shape.push_back(static_cast<uint64_t>(spec.n));
  Json json = {
      {"format", FormatName(spec.format)},
      {"shape", std::move(shape)},
      {"group_size", static_cast<uint64_t>(spec.group_size)},
      {"scale_type", ScaleTypeName(spec.scale_type)},
      {"zeros", spec.has_zeros},
      {"biases", spec.has_biases},
      {"global_scale", spec.has_global_scale},
      {"layer_class", LayerClassName(record.module.layer_class)},
      {"source_layout", LayoutName(record.layout)},
  };
  if (version >= 2) {
    json["zero_type"] = ScaleTypeName(spec.zero_type);
    json["global_scale_divides"] = spec.global_scale_divides;
    if (spec.sparsity != Sparsity::kDense) json["sparsity"] = SparsityName(spec.sparsity);
    if (spec.has_permutation) json["permutation"] = true;
    if (spec.has_input_scale) json["input_scale"] = true;
    if (spec.input_hadamard > 0) {
      json["input_hadamard"] = static_cast<uint64_t>(spec.input_hadamard);
    }
    if (spec.super_group_size > 0) {
      json["super_group_size"] = static_cast<uint64_t>(spec.super_group_size);
    }
    if (!record.method.empty()) json["method"] = record.method;
  }
  if (record.codes != PackedLayout::kKPacked) json["layout"] = PackedLayoutName(record.codes);
  return json;
}

Status ParseShape(ObjectReader& reader, ModuleRecord* record) {
  MARLIN_ASSIGN_OR_RETURN(const Json* shape, reader.Take("shape"));
  if (!shape->is_array()) return reader.WrongType("shape", "an array", *shape);
  if (shape->size() != 2 && shape->size() != 3) {
    return reader.Fail(fmt::format("\"shape\": expected [k, n] or [experts, k, n], got {} numbers",
                                   shape->size()));
  }
  std::array<int64_t, 3> dims = {1, 0, 0};
  for (size_t i = 0; i < shape->size(); ++i) {
    MARLIN_ASSIGN_OR_RETURN(dims[i + 3 - shape->size()], reader.Dimension("shape", (*shape)[i]));
  }
  record->stacked = shape->size() == 3;
  WeightsSpec& spec = record->module.spec;
  spec.experts = dims[0];
  spec.k = dims[1];
  spec.n = dims[2];
  // Otherwise a file of few bytes could declare 2^31 experts or rows.
  if (std::min({spec.experts, spec.k, spec.n}) < 1) {
    return reader.Fail(fmt::format("\"shape\": {} experts of [{}, {}] hold no weights",
                                   spec.experts, spec.k, spec.n));
  }
  return {};
}

Status ParseFlags(ObjectReader& reader, WeightsSpec* spec) {
  MARLIN_ASSIGN_OR_RETURN(spec->has_zeros, reader.TakeBool("zeros"));
  MARLIN_ASSIGN_OR_RETURN(spec->has_biases, reader.TakeBool("biases"));
  MARLIN_ASSIGN_OR_RETURN(spec->has_global_scale, reader.TakeBool("global_scale"));
  const ZeroPoint zero = GetFormatInfo(spec->format).zero_point;
  if (zero == ZeroPoint::kNone && spec->has_zeros) {
    return reader.Fail(fmt::format("{} has no zero points", FormatName(spec->format)));
  }
  if (spec->has_zeros && spec->has_biases) return reader.Fail("both zeros and biases");
  if ((spec->scale_type == ScaleType::kE4M3) != spec->has_global_scale) {
    return reader.Fail("a global scale belongs to e4m3 scales and to no others");
  }
  return {};
}

/// The keys that version 2 added; sparsity, input transforms and super scales only where a
/// module has them.
Status ParseAddedKeys(ObjectReader& reader, int64_t version, const Json& json, WeightsSpec* spec) {
  if (version >= 2) {
    MARLIN_ASSIGN_OR_RETURN(const std::string name, reader.TakeString("zero_type"));
    const Result<ScaleType> zero_type = ParseScaleType(name);
    if (!zero_type.ok()) return reader.Fail(zero_type.status().message());
    spec->zero_type = *zero_type;
    MARLIN_ASSIGN_OR_RETURN(spec->global_scale_divides, reader.TakeBool("global_scale_divides"));
    if (json.contains("sparsity")) {
      MARLIN_ASSIGN_OR_RETURN(const std::string text, reader.TakeString("sparsity"));
      const Result<Sparsity> sparsity = ParseSparsity(text);
      if (!sparsity.ok()) return reader.Fail(sparsity.status().message());
      spec->sparsity = *sparsity;
    }
    if (json.contains("permutation")) {
      MARLIN_ASSIGN_OR_RETURN(spec->has_permutation, reader.TakeBool("permutation"));
    }
    if (json.contains("input_scale")) {
      MARLIN_ASSIGN_OR_RETURN(spec->has_input_scale, reader.TakeBool("input_scale"));
    }
    if (json.contains("input_hadamard")) {
      MARLIN_ASSIGN_OR_RETURN(spec->input_hadamard, reader.TakeDimension("input_hadamard"));
      if (spec->input_hadamard < 1) return reader.Fail("\"input_hadamard\": 0");
    }
    if (json.contains("super_group_size")) {
      MARLIN_ASSIGN_OR_RETURN(spec->super_group_size, reader.TakeDimension("super_group_size"));
      if (spec->super_group_size < 1) return reader.Fail("\"super_group_size\": 0");
    }
    for (const Status& possible : {CheckInputTransform(*spec), CheckSuperGroups(*spec)}) {
      if (!possible.ok()) return reader.Fail(possible.message());
    }
  }
  const int oldest = OldestVersionOf(*spec);
  if (oldest <= version) return {};
  return reader.Fail(fmt::format("{}{} needs version {} of quantization_config, got {}",
                                 FormatName(spec->format), spec->has_zeros ? " with zeros" : "",
                                 oldest, version));
}

/// The key that version 3 added, for codes that are not k-packed.
Status ParseLayout(ObjectReader& reader, int64_t version, const Json& json, ModuleRecord* record) {
  if (version < 3 || !json.contains("layout")) return {};
  MARLIN_ASSIGN_OR_RETURN(const std::string name, reader.TakeString("layout"));
  const Result<PackedLayout> layout = ParsePackedLayout(name);
  if (!layout.ok()) return reader.Fail(layout.status().message());
  record->codes = *layout;
  const WeightsSpec& spec = record->module.spec;
  if (record->codes == PackedLayout::kKPacked || HasTiledLayout(spec)) return {};
  return reader.Fail(fmt::format("\"layout\": {} holds dense codes of 4 bits, not {}{}", name,
                                 FormatName(spec.format),
                                 spec.sparsity == Sparsity::kDense ? "" : " 2:4"));
}

Result<ModuleRecord> ParseModule(const std::string& name, const Json& json, int64_t version,
                                 const std::string& file) {
  ObjectReader reader(json, fmt::format("{}: module \"{}\"", Printable(file), Printable(name)));
  if (!json.is_object())
    return reader.Fail(fmt::format("expected an object, got {}", json.type_name()));
  const auto in_reader = [&reader](const Status& status) { return reader.Fail(status.message()); };
  ModuleRecord record;
  record.module.name = name;
  WeightsSpec& spec = record.module.spec;
  MARLIN_ASSIGN_OR_RETURN(const std::string format_name, reader.TakeString("format"));
  const Result<Format> format = ParseFormat(format_name);
  if (!format.ok()) return in_reader(format.status());
  spec.format = *format;
  if (!GetFormatInfo(spec.format).quantized) {
    return reader.Fail(fmt::format("{} is not a quantized format", FormatName(spec.format)));
  }
  MARLIN_RETURN_IF_ERROR(ParseShape(reader, &record));
  MARLIN_ASSIGN_OR_RETURN(spec.group_size, reader.TakeDimension("group_size"));
  if (spec.group_size < 1) return reader.Fail("\"group_size\": 0");
  MARLIN_ASSIGN_OR_RETURN(const std::string scale_name, reader.TakeString("scale_type"));
  const Result<ScaleType> scale_type = ParseScaleType(scale_name);
  if (!scale_type.ok()) return in_reader(scale_type.status());
  spec.scale_type = *scale_type;
  MARLIN_RETURN_IF_ERROR(ParseFlags(reader, &spec));
  MARLIN_RETURN_IF_ERROR(ParseAddedKeys(reader, version, json, &spec));
  if (version >= 2 && json.contains("method")) {
    MARLIN_ASSIGN_OR_RETURN(record.method, reader.TakeString("method"));
  }
  MARLIN_RETURN_IF_ERROR(ParseLayout(reader, version, json, &record));
  MARLIN_ASSIGN_OR_RETURN(const std::string class_name, reader.TakeString("layer_class"));
  const Result<LayerClass> layer_class = ParseLayerClass(class_name);
  if (!layer_class.ok()) return in_reader(layer_class.status());
  record.module.layer_class = *layer_class;
  MARLIN_ASSIGN_OR_RETURN(const std::string layout, reader.TakeString("source_layout"));
  if (layout != "out_in" && layout != "in_out") {
    return reader.Fail(
        fmt::format("\"source_layout\": expected out_in or in_out, got \"{}\"", Printable(layout)));
  }
  record.layout = layout == "out_in" ? SourceLayout::kOutIn : SourceLayout::kInOut;
  // The experts' numbers take the wildcard's place; any other '*' would name no tensor.
  const auto stars = std::count(name.begin(), name.end(), '*');
  const bool wildcard = name.find(kExpertWildcard) != std::string::npos;
  if (stars != (wildcard ? 1 : 0)) {
    return reader.Fail("the name has a '*' that is not the \".*.\" of experts");
  }
  if (wildcard && !record.stacked) {
    return reader.Fail("the name stands for several experts, the shape for one matrix");
  }
  MARLIN_RETURN_IF_ERROR(reader.CheckAllTaken());
  return record;
}

constexpr std::pair<ModulePart, TensorView QuantizedWeights::*> kPartViews[] = {
    {ModulePart::kCodes, &QuantizedWeights::codes},
    {ModulePart::kScales, &QuantizedWeights::scales},
    {ModulePart::kZeros, &QuantizedWeights::zeros},
    {ModulePart::kBiases, &QuantizedWeights::biases},
    {ModulePart::kGlobalScale, &QuantizedWeights::global_scale},
    {ModulePart::kMetadata, &QuantizedWeights::metadata},
    {ModulePart::kPermutation, &QuantizedWeights::permutation},
    {ModulePart::kInputScale, &QuantizedWeights::input_scale},
    {ModulePart::kSuperScales, &QuantizedWeights::super_scales},
    {ModulePart::kSuperBiases, &QuantizedWeights::super_biases},
};

}  // namespace

std::string ModuleBaseName(std::string_view module_name) {
  std::string base(module_name);
  if (module_name.ends_with(kWeightSuffix)) base.resize(base.size() - kWeightSuffix.size());
  const size_t wildcard = base.find(kExpertWildcard);
  if (wildcard != std::string::npos) base.erase(wildcard, kExpertWildcard.size() - 1);
  return base;
}

std::vector<ModuleTensor> ModuleTensors(const ModuleRecord& record) {
  const WeightsSpec& spec = record.module.spec;
  const std::string base = ModuleBaseName(record.module.name);
  std::vector<ModuleTensor> tensors;
  const auto add = [&](ModulePart part, std::string_view suffix, DType dtype, Shape shape) {
    // Dimensions from a file may overflow; no tensor has such a shape, so -1 never matches.
    Checked bytes(DTypeBytes(dtype));
    for (int i = 0; i < shape.rank(); ++i) bytes = bytes * Checked(shape[i]);
    tensors.push_back({part, base + std::string(suffix), dtype, shape, bytes.Take().value_or(-1)});
  };
  const auto matrix = [&](int64_t rows) {
    Shape shape;
    if (record.stacked) shape.Append(spec.experts);
    shape.Append(rows);
    shape.Append(spec.n);
    return shape;
  };
  const Shape groups = matrix(GroupCount(spec));
  if (record.codes == PackedLayout::kMarlinW4) {
    const Shape tiles = TiledShape(spec);
    Shape shape;
    if (record.stacked) shape.Append(spec.experts);
    for (int i = 0; i < tiles.rank(); ++i) shape.Append(tiles[i]);
    add(ModulePart::kCodes, ".qweight", DType::kU32, shape);
  } else {
    add(ModulePart::kCodes, ".qweight", DType::kU32, matrix(WordsAlongK(spec)));
  }
  if (spec.sparsity == Sparsity::k24) {
    add(ModulePart::kMetadata, ".metadata", DType::kU32, matrix(MetadataWordsAlongK(spec.k)));
  }
  add(ModulePart::kScales, ".scales", StoredScaleDType(spec), groups);
  if (spec.has_zeros) add(ModulePart::kZeros, ".zeros", ScaleDType(spec.zero_type), groups);
  if (spec.has_biases) {
    add(ModulePart::kBiases, ".qbias", StoredBiasDType(spec), groups);
  }
  if (spec.super_group_size > 0) {
    const DType dtype = ScaleDType(spec.scale_type);
    const Shape super_groups = matrix(SuperGroupCount(spec));
    add(ModulePart::kSuperScales, ".super_scales", dtype, super_groups);
    if (spec.has_biases) add(ModulePart::kSuperBiases, ".super_qbias", dtype, super_groups);
  }
  if (spec.has_global_scale) {
    add(ModulePart::kGlobalScale, ".global_scale", DType::kF32, {spec.experts});
  }
  if (spec.has_permutation) {
    const Shape rows = record.stacked ? Shape{spec.experts, spec.k} : Shape{spec.k};
    add(ModulePart::kPermutation, ".permutation", DType::kI32, rows);
  }
  if (spec.has_input_scale) {
    const Shape rows = record.stacked ? Shape{spec.experts, spec.k} : Shape{spec.k};
    add(ModulePart::kInputScale, ".input_scale", DType::kF32, rows);
  }
  const FormatInfo& info = GetFormatInfo(spec.format);
  if (info.has_codebook) {
    add(ModulePart::kCodebook, ".codebook", DType::kF32, {int64_t{1} << info.bits});
  }
  return tensors;
}

TensorView* PartView(QuantizedWeights* weights, ModulePart part) {
  for (const auto& [viewed, view] : kPartViews) {
    if (viewed == part) return &(weights->*view);
  }
  return nullptr;
}

const TensorView* PartView(const QuantizedWeights& weights, ModulePart part) {
  return PartView(const_cast<QuantizedWeights*>(&weights), part);
}

int OldestVersionOf(const WeightsSpec& spec) {
  const int bits = GetFormatInfo(spec.format).bits;
  const bool added = spec.format == Format::kU8 || (spec.format == Format::kS8 && spec.has_zeros) ||
                     bits == 5 || bits == 6 || spec.zero_type != ScaleType::kF16 ||
                     spec.global_scale_divides || spec.sparsity != Sparsity::kDense ||
                     TransformsInput(spec) || spec.super_group_size > 0;
  return added ? 2 : 1;
}

std::string QuantizationConfigChecksum(const Json& json) {
  // Value by value: a copy without the key would take as much memory as a large model's modules.
  std::string text = "{";
  for (const auto& [key, value] : json.items()) {
    if (key == "checksum") continue;
    text += fmt::format("{}{}:{}", text.size() > 1 ? "," : "", DumpJson(key), DumpJson(value));
  }
  return ChecksumText(ChecksumOf(text + "}"));
}

Json BuildQuantizationConfig(const QuantizationConfig& config, const Json& recipe_document) {
  int version = 1;
  for (const ModuleRecord& record : config.modules) {
    version = std::max(version, OldestVersionOf(record));
    if (!record.method.empty()) version = std::max(version, 2);
  }
  Json modules = Json::object();
  for (const ModuleRecord& record : config.modules) {
    modules[record.module.name] = ModuleJson(record, version);
  }
  Json json = {
      {"quant_method", kQuantMethod},  {"version", static_cast<uint64_t>(version)},
      {"recipe", config.recipe_name},  {"recipe_document", recipe_document},
      {"method", config.method},       {"layout", "k_packed"},
      {"modules", std::move(modules)},
  };
  json["checksum"] = QuantizationConfigChecksum(json);
  return json;
}

Result<QuantizationConfig> ParseQuantizationConfig(const Json& json, const std::string& file) {
  ObjectReader reader(json, Printable(file) + ": quantization_config");
  MARLIN_ASSIGN_OR_RETURN(const int64_t version, reader.TakeDimension("version"));
  if (version > kCheckpointVersion) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: quantization_config: version {}, this build reads up to {}",
                              Printable(file), version, kCheckpointVersion));
  }
  if (version < 1) return reader.Fail("\"version\": 0");
  QuantizationConfig config;
  MARLIN_RETURN_IF_ERROR(reader.Take("quant_method").status());
  MARLIN_ASSIGN_OR_RETURN(config.recipe_name, reader.TakeString("recipe"));
  MARLIN_RETURN_IF_ERROR(reader.Take("recipe_document").status());
  MARLIN_ASSIGN_OR_RETURN(config.method, reader.TakeString("method"));
  MARLIN_ASSIGN_OR_RETURN(const std::string layout, reader.TakeString("layout"));
  if (layout != "k_packed") {
    return reader.Fail(fmt::format("\"layout\": expected k_packed, got \"{}\"", Printable(layout)));
  }
  MARLIN_ASSIGN_OR_RETURN(const std::string checksum, reader.TakeString("checksum"));
  MARLIN_ASSIGN_OR_RETURN(const Json* modules, reader.Take("modules"));
  MARLIN_RETURN_IF_ERROR(reader.CheckAllTaken());
  if (!modules->is_object()) return reader.WrongType("modules", "an object", *modules);
  for (const auto& [name, module] : modules->items()) {
    MARLIN_ASSIGN_OR_RETURN(ModuleRecord record, ParseModule(name, module, version, file));
    config.modules.push_back(std::move(record));
  }
  // Most edits of a group size leave all tensor shapes as they are; only the checksum detects them.
  const std::string actual = QuantizationConfigChecksum(json);
  if (actual != checksum) {
    return reader.Fail(fmt::format("the content has checksum {}, \"checksum\" says {}", actual,
                                   Printable(checksum)));
  }
  return config;
}

}  // namespace marlin
