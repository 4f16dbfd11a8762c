// GGUF files, single and sharded: docs/formats/gguf.md.
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/module_reader.h"
#include "checkpoint/readers/gguf/gguf_blocks.h"
#include "checkpoint/readers/gguf/gguf_config.h"
#include "checkpoint/readers/gguf/gguf_generation.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/readers/gguf/gguf_rows.h"
#include "checkpoint/readers/gguf/gguf_tensors.h"
#include "checkpoint/readers/gguf/gguf_tokenizer.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

constexpr std::string_view kRopeFactors = "rope_freqs.weight";

/// The rows and tensors that a module is loaded from.
struct ModuleSource {
  GgufStored stored;
  GgufRows rows;
  std::vector<std::string> parts;  ///< Names of tensors, the codes first.
  std::vector<float> global_scale;
};

class GgufReader final : public ModuleReader {
 public:
  explicit GgufReader(TensorStore& store) : store_(store), list_(store) {}

  Status Open() {
    MARLIN_RETURN_IF_ERROR(list_.Read());
    MARLIN_RETURN_IF_ERROR(MakeConfig());
    for (const auto& [tensor_name, tensor] : list_.tensors()) {
      for (const std::string& scale : list_.ScaleNames(tensor)) {
        if (const auto found = list_.tensors().find(scale); found != list_.tensors().end()) {
          used_.emplace(found->first);
        }
      }
    }
    for (const auto& [tensor_name, tensor] : list_.tensors()) {
      if (used_.contains(tensor_name)) continue;
      MARLIN_RETURN_IF_ERROR(AddTensor(tensor));
    }
    return Finish();
  }

  std::vector<PartTensor> Parts(const ModuleRecord& record) const override {
    std::vector<PartTensor> parts;
    for (const std::string& name : sources_.at(record.module.name).parts) {
      const ModulePart part = parts.empty() || name.ends_with(".weight") ? ModulePart::kCodes
                                                                         : ModulePart::kGlobalScale;
      parts.push_back({part, *store_.FindTensor(name)});
    }
    return parts;
  }

  Result<QuantizedWeights> Load(const ModuleRecord& record) const override {
    const ModuleSource& source = sources_.at(record.module.name);
    return PackGgufRows(source.rows, source.stored, record.module.spec, source.global_scale,
                        pool_.Get());
  }

  std::vector<ContainedFile> Files() const override {
    std::vector<ContainedFile> files = GgufTokenizerFiles(list_.metadata());
    if (std::optional<ContainedFile> file = File(kGenerationFile)) files.push_back(*file);
    return files;
  }
  std::optional<ContainedFile> File(const std::string& name) const override {
    if (name != kGenerationFile) return ModuleReader::File(name);
    std::string text = GgufGenerationConfig(list_.metadata());
    if (text.empty()) return std::nullopt;
    return ContainedFile{name, std::move(text), ""};
  }

 private:
  static constexpr const char* kGenerationFile = "generation_config.json";

  Status MakeConfig() {
    const std::string_view name = list_.metadata().Text("general.architecture").value_or("");
    Json config = Json::object();
    if (list_.architecture() != nullptr) {
      const auto find = [this](std::string_view tensor) -> const Shape* {
        const auto found = list_.tensors().find(tensor);
        return found == list_.tensors().end() ? nullptr : &found->second.tensor->dims;
      };
      MARLIN_ASSIGN_OR_RETURN(const std::vector<float> factors, TakeRopeFactors());
      config = GgufConfig(*list_.architecture(), list_.metadata(), {find, factors});
    } else if (!name.empty()) {
      config["model_type"] = std::string(name);
    }
    if (config.empty()) return {};
    return store_.SetConfig(DumpJson(config, 2) + "\n", store_.path);
  }

  /// config.json has no place for this tensor: it becomes "rope_scaling".
  Result<std::vector<float>> TakeRopeFactors() {
    const auto found = list_.tensors().find(kRopeFactors);
    if (found == list_.tensors().end()) return std::vector<float>();
    used_.emplace(kRopeFactors);
    return list_.Floats(found->second);
  }

  size_t StoreTensor(const GgufFileTensor& tensor, std::string name, DType dtype, Shape shape,
                     int64_t offset, int64_t bytes) {
    store_.tensors.push_back({std::move(name), dtype, shape, store_.files[tensor.file].name,
                              tensor.tensor->offset + offset, bytes});
    return store_.tensors.size() - 1;
  }

  Status AddTensor(const GgufFileTensor& tensor) {
    if (static_cast<int64_t>(store_.tensors.size()) > kMaxTensorCount) {
      return list_.Fail(fmt::format("more than {} tensors", kMaxTensorCount));
    }
    if (list_.architecture() != nullptr) {
      if (IsPartner(tensor)) return {};
      if (const std::string values = LatentPartner(tensor); !values.empty()) {
        return AddLatent(tensor, list_.tensors().find(values)->second);
      }
      const auto partner = GgufInterleavedPartner(*list_.architecture(), tensor.tensor->name);
      if (partner) return AddInterleaved(tensor, *partner);
    }
    const Shape& dims = tensor.tensor->dims;
    if (tensor.place.experts && dims.rank() != 3 && tensor.place.name.ends_with(".weight")) {
      return list_.FailTensor(tensor,
                              fmt::format("expected a stack of experts, got {}", dims.ToString()));
    }
    GgufRows rows;
    rows.stacks = {list_.Data(tensor)};
    MARLIN_RETURN_IF_ERROR(list_.SetRows(tensor, &rows));
    if (!tensor.stored.quantized()) return AddUnquantized(tensor, rows);
    const bool matrix = dims.rank() == 2 || dims.rank() == 3;
    return matrix && !tensor.place.as_row ? AddModule(tensor, std::move(rows), {})
                                          : AddValues(tensor, std::move(rows));
  }

  Status AddUnquantized(const GgufFileTensor& tensor, const GgufRows& rows) {
    const Shape& dims = tensor.tensor->dims;
    const int64_t bytes = tensor.tensor->bytes;
    const std::string& name = tensor.place.name;
    const size_t star = name.find('*');
    if (star != std::string::npos && dims.rank() == 3 && bytes > 0) {
      return SplitExperts(tensor, star);
    }
    if (star != std::string::npos) {
      return list_.FailTensor(tensor, fmt::format("{} is no stack of experts", dims.ToString()));
    }
    Shape shape = dims;
    const bool transposed = IsInOut(name) && dims.rank() == 3;
    if (transposed) shape = {dims[0], dims[2], dims[1]};
    if (tensor.place.as_row && dims.rank() == 1) shape = {1, dims[0]};
    StoreTensor(tensor, name, tensor.stored.dtype, shape, 0, bytes);
    if (rows.head_dim != 0 || transposed) {
      computed_[name] = [rows, transposed, size = tensor.stored.bytes](std::byte* out) {
        CopyGgufRows(rows, size, transposed, out);
      };
    }
    return {};
  }

  bool IsInOut(std::string_view name) const {
    return list_.architecture() != nullptr && list_.architecture()->model_type == "gpt_oss" &&
           (name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj"));
  }

  Status SplitExperts(const GgufFileTensor& tensor, size_t star) {
    const Shape& dims = tensor.tensor->dims;
    if (static_cast<int64_t>(store_.tensors.size()) + dims[0] > kMaxTensorCount) {
      return list_.FailTensor(
          tensor, fmt::format("{} experts are more than {} tensors", dims[0], kMaxTensorCount));
    }
    const int64_t bytes = tensor.tensor->bytes / dims[0];
    for (int64_t e = 0; e < dims[0]; ++e) {
      std::string name = tensor.place.name;
      name.replace(star, 1, std::to_string(e));
      StoreTensor(tensor, std::move(name), tensor.stored.dtype, {dims[1], dims[2]}, e * bytes,
                  bytes);
    }
    return {};
  }

  /// A quantized tensor that is no matrix: its values in fp32.
  Status AddValues(const GgufFileTensor& tensor, GgufRows rows) {
    const Shape& dims = tensor.tensor->dims;
    const std::optional<int64_t> bytes =
        (Checked(dims.ElementCount()) * Checked(DTypeBytes(DType::kF32))).Take();
    if (!bytes)
      return list_.FailTensor(tensor, fmt::format("the size of {} overflows", dims.ToString()));
    const Shape shape = tensor.place.as_row && dims.rank() == 1 ? Shape{1, dims[0]} : dims;
    StoreTensor(tensor, tensor.place.name, DType::kF32, shape, 0, *bytes);
    computed_[tensor.place.name] = [rows = std::move(rows),
                                    stored = tensor.stored](std::byte* out) {
      DequantizeGgufRows(rows, stored, reinterpret_cast<float*>(out));
    };
    return {};
  }

  Status AddModule(const GgufFileTensor& tensor, GgufRows rows, const GgufFileTensor* partner) {
    const Shape& dims = tensor.tensor->dims;
    if (dims.ElementCount() == 0)
      return list_.FailTensor(tensor, dims.ToString() + " holds no weights");
    const GgufFormat& format = *tensor.stored.format;
    ModuleRecord record;
    record.module.name = tensor.place.name;
    record.module.layer_class = ClassifyTensor(tensor.place.name);
    record.stacked = dims.rank() == 3;
    record.layout = IsInOut(tensor.place.name) ? SourceLayout::kInOut : SourceLayout::kOutIn;
    WeightsSpec& spec = record.module.spec;
    spec.format = format.format;
    spec.experts = rows.experts;
    spec.k = dims[dims.rank() - 1];
    spec.n = rows.rows;
    spec.group_size = format.group_size;
    spec.scale_type = format.scale_type;
    spec.super_group_size = format.super_group_size;
    spec.has_biases = format.biases;
    spec.has_global_scale = format.scale_type == ScaleType::kE4M3;
    if (const Status possible = CheckSpec(spec); !possible.ok()) {
      return list_.FailTensor(tensor, std::string(possible.message()));
    }
    ModuleSource source;
    source.stored = tensor.stored;
    source.rows = std::move(rows);
    for (const GgufFileTensor* part : {&tensor, partner}) {
      if (part == nullptr) continue;
      StorePart(*part);
      source.parts.emplace_back(part->tensor->name);
    }
    if (spec.has_global_scale) MARLIN_RETURN_IF_ERROR(TakeScales(tensor, spec, &source));
    if (!sources_.emplace(record.module.name, std::move(source)).second) {
      return list_.FailTensor(
          tensor, fmt::format("two tensors would both be \"{}\"", Printable(record.module.name)));
    }
    modules_.push_back(std::move(record));
    return {};
  }

  /// A part keeps its name in the file, and the bytes of its blocks.
  void StorePart(const GgufFileTensor& tensor) {
    Shape shape = tensor.tensor->dims;
    const int last = shape.rank() - 1;
    shape[last] = shape[last] / tensor.stored.elements * tensor.stored.bytes;
    StoreTensor(tensor, std::string(tensor.tensor->name), DType::kU8, shape, 0,
                tensor.tensor->bytes);
  }

  Status TakeScales(const GgufFileTensor& tensor, const WeightsSpec& spec, ModuleSource* source) {
    for (const std::string& name : list_.ScaleNames(tensor)) {
      const auto found = list_.tensors().find(name);
      if (found == list_.tensors().end()) continue;
      const GgufFileTensor& scale = found->second;
      MARLIN_ASSIGN_OR_RETURN(std::vector<float> values, list_.Floats(scale));
      const auto count = static_cast<int64_t>(values.size());
      if (count != 1 && count != spec.experts) {
        return list_.FailTensor(
            scale, fmt::format("expected 1 or {} values, got {}", spec.experts, count));
      }
      // The scale of activations has no use where activations are not quantized.
      if (!name.ends_with(".input_scale")) source->global_scale = std::move(values);
      StoreTensor(scale, std::string(scale.tensor->name), DType::kF32, scale.tensor->dims, 0,
                  scale.tensor->bytes);
      source->parts.emplace_back(scale.tensor->name);
    }
    return {};
  }

  /// True for the second of two tensors that AddInterleaved or AddLatent adds.
  bool IsPartner(const GgufFileTensor& tensor) const {
    std::string name(tensor.tensor->name);
    if (list_.architecture()->name == "deepseek2" && name.ends_with(kLatentValues)) {
      name.replace(name.size() - kLatentValues.size(), kLatentValues.size(), kLatentKeys);
      return list_.tensors().contains(name);
    }
    const size_t at = name.find(".ffn_up_exps.");
    if (at == std::string::npos) return false;
    name.replace(at, 13, ".ffn_gate_exps.");
    return GgufInterleavedPartner(*list_.architecture(), name) && list_.tensors().contains(name);
  }

  static constexpr std::string_view kLatentKeys = ".attn_k_b.weight";
  static constexpr std::string_view kLatentValues = ".attn_v_b.weight";

  /// deepseek2: the name of the values that belong to keys; empty for every other tensor.
  std::string LatentPartner(const GgufFileTensor& tensor) const {
    std::string name(tensor.tensor->name);
    if (list_.architecture()->name != "deepseek2" || !name.ends_with(kLatentKeys)) return {};
    name.replace(name.size() - kLatentKeys.size(), kLatentKeys.size(), kLatentValues);
    return list_.tensors().contains(name) ? name : std::string();
  }

  /// Keys and values of MLA become the one matrix that they were made from. The keys were
  /// transposed before they were quantized, so that only fp32 holds the values.
  Status AddLatent(const GgufFileTensor& keys, const GgufFileTensor& values) {
    const Shape& k = keys.tensor->dims;
    const Shape& v = values.tensor->dims;
    if (k.rank() != 3 || v.rank() != 3 || k[0] != v[0] || k[1] != v[2]) {
      return list_.FailTensor(keys, fmt::format("{} does not fit {} of \"{}\"", k.ToString(),
                                                v.ToString(), Printable(values.tensor->name)));
    }
    for (const GgufFileTensor* part : {&keys, &values}) {
      const DType dtype = part->stored.dtype;
      if (part->stored.quantized() || dtype == DType::kF32 || dtype == DType::kF16 ||
          dtype == DType::kBf16) {
        continue;
      }
      return list_.FailTensor(*part, fmt::format("expected floats, got {}", part->stored.name));
    }
    GgufLatent latent{{}, keys.stored, {}, values.stored};
    latent.keys.stacks = {list_.Data(keys)};
    latent.values.stacks = {list_.Data(values)};
    MARLIN_RETURN_IF_ERROR(list_.SetRows(keys, &latent.keys));
    MARLIN_RETURN_IF_ERROR(list_.SetRows(values, &latent.values));
    const std::optional<int64_t> rows = (Checked(k[0]) * (Checked(k[2]) + Checked(v[1]))).Take();
    const std::optional<int64_t> bytes =
        rows ? (Checked(*rows) * Checked(k[1]) * Checked(DTypeBytes(DType::kF32))).Take()
             : std::nullopt;
    if (!bytes)
      return list_.FailTensor(keys, fmt::format("the size of {} overflows", k.ToString()));
    const std::string layer(keys.tensor->name.substr(0, keys.tensor->name.find(kLatentKeys)));
    const std::string name =
        PlaceGgufTensor(*list_.architecture(), list_.with_experts(), layer + ".attn_kv_b.weight")
            .name;
    StoreTensor(keys, name, DType::kF32, {*rows, k[1]}, 0, *bytes);
    computed_[name] = [latent = std::move(latent)](std::byte* out) {
      JoinGgufLatent(latent, reinterpret_cast<float*>(out));
    };
    return {};
  }

  /// One module has one factor for each expert, so gate and up must agree.
  Status CheckSameFactors(const GgufFileTensor& gate, const GgufFileTensor& up) const {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<float> of_gate, list_.FactorsOf(gate));
    MARLIN_ASSIGN_OR_RETURN(const std::vector<float> of_up, list_.FactorsOf(up));
    if (of_gate == of_up) return {};
    return list_.Fail(
        fmt::format("tensor \"{}\": its factors differ from those of \"{}\", and both are "
                    "rows of one matrix elsewhere",
                    Printable(up.tensor->name), Printable(gate.tensor->name)),
        Code::kUnsupported);
  }

  /// gpt-oss: the rows of gate and up in turn.
  Status AddInterleaved(const GgufFileTensor& gate, const std::string& partner) {
    const auto found = list_.tensors().find(partner);
    if (found == list_.tensors().end()) {
      return list_.FailTensor(gate,
                              fmt::format("there is no \"{}\" beside it", Printable(partner)));
    }
    const GgufFileTensor& up = found->second;
    const Shape& dims = gate.tensor->dims;
    if (!(dims == up.tensor->dims) || gate.tensor->type != up.tensor->type || dims.rank() < 2) {
      return list_.FailTensor(
          gate, fmt::format("{} {} beside {} {} of \"{}\"", gate.stored.name, dims.ToString(),
                            up.stored.name, up.tensor->dims.ToString(), Printable(partner)));
    }
    if (gate.tensor->bytes == 0)
      return list_.FailTensor(gate, dims.ToString() + " holds no weights");
    GgufRows rows;
    rows.stacks = {list_.Data(gate), list_.Data(up)};
    // The biases [experts, n] are a stack of columns of one element.
    const bool biases = dims.rank() == 2;
    rows.experts = dims[0];
    rows.rows = 2 * dims[1];
    rows.row_bytes =
        biases ? gate.stored.bytes : dims[2] / gate.stored.elements * gate.stored.bytes;
    if (gate.stored.quantized() && !biases) {
      MARLIN_RETURN_IF_ERROR(CheckSameFactors(gate, up));
      return AddModule(gate, std::move(rows), &up);
    }
    if (gate.stored.quantized()) return list_.FailTensor(gate, "a quantized bias");
    const bool transposed = !biases;
    const Shape shape = biases ? Shape{dims[0], 2 * dims[1]} : Shape{dims[0], dims[2], 2 * dims[1]};
    StoreTensor(gate, gate.place.name, gate.stored.dtype, shape, 0, 2 * gate.tensor->bytes);
    computed_[gate.place.name] = [rows, transposed, size = gate.stored.bytes](std::byte* out) {
      CopyGgufRows(rows, size, transposed, out);
    };
    return {};
  }

  Status Finish() {
    std::sort(modules_.begin(), modules_.end(), [](const ModuleRecord& a, const ModuleRecord& b) {
      return a.module.name < b.module.name;
    });
    MARLIN_RETURN_IF_ERROR(SortTensors(&store_));
    for (auto& [name, compute] : computed_) {
      const size_t tensor = *store_.FindTensor(name);
      // Without data the other dimensions are unbounded: no loop may run over them.
      if (store_.tensors[tensor].bytes > 0) store_.computed.emplace(tensor, std::move(compute));
    }
    computed_.clear();
    for (const ModuleRecord& record : modules_) {
      const std::string& name = record.module.name;
      const std::optional<size_t> clash = store_.FindTensor(name);
      const std::vector<std::string>& parts = sources_.at(name).parts;
      if (clash && std::find(parts.begin(), parts.end(), name) == parts.end()) {
        return list_.Fail(fmt::format("tensor \"{}\" and tensor \"{}\" are both \"{}\"",
                                      Printable(parts.front()), Printable(name), Printable(name)));
      }
    }
    return {};
  }

  TensorStore& store_;
  GgufTensorList list_;
  LoadingPool pool_;
  std::set<std::string_view> used_;              ///< Tensors that are a part of another.
  std::map<std::string, ModuleSource> sources_;  ///< By module name.
  std::map<std::string, std::function<void(std::byte*)>> computed_;  ///< Until Finish.
};

}  // namespace

OpenReader OpenGguf;

Result<std::unique_ptr<const ModuleReader>> OpenGguf(TensorStore& store,
                                                     const QuantMethod& /*method*/) {
  auto reader = std::make_unique<GgufReader>(store);
  MARLIN_RETURN_IF_ERROR(reader->Open());
  return std::unique_ptr<const ModuleReader>(std::move(reader));
}

}  // namespace marlin
