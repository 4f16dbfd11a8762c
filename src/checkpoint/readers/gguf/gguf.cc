// GGUF files, single and sharded: docs/formats/gguf.md.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
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
#include "checkpoint/readers/gguf/gguf_pairs.h"
#include "checkpoint/readers/gguf/gguf_rows.h"
#include "checkpoint/readers/gguf/gguf_tensors.h"
#include "checkpoint/readers/gguf/gguf_tokenizer.h"
#include "layout/move_runs.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

/// config.json has no place for these tensors: they become "rope_scaling".
constexpr std::string_view kRopeFactors = "rope_freqs.weight";
constexpr std::string_view kShortRopeFactors = "rope_factors_short.weight";
constexpr std::string_view kLongRopeFactors = "rope_factors_long.weight";

/// The rows and tensors that a module is loaded from.
struct ModuleSource {
  GgufStored stored;
  WeightsSpec spec;  ///< As stored: before parts of its rows are moved.
  GgufRows rows;
  std::vector<std::string> parts;  ///< Names of tensors, the codes first.
  std::vector<float> global_scale;
};

/// The values of a tensor, which has no place elsewhere; empty: there is none.
Result<std::vector<float>> TakeFactors(const GgufTensorList& list, std::string_view name,
                                       std::set<std::string_view>* used) {
  const auto found = list.tensors().find(name);
  if (found == list.tensors().end()) return std::vector<float>();
  used->emplace(name);
  return list.Floats(found->second);
}

Result<Json> ConfigOf(const GgufTensorList& list, std::set<std::string_view>* used) {
  const auto find = [&](std::string_view tensor) -> const Shape* {
    const auto found = list.tensors().find(tensor);
    return found == list.tensors().end() ? nullptr : &found->second.tensor->dims;
  };
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> all, TakeFactors(list, kRopeFactors, used));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> of_short,
                          TakeFactors(list, kShortRopeFactors, used));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<float> of_long,
                          TakeFactors(list, kLongRopeFactors, used));
  return GgufConfig(list.naming(), list.metadata(), {find, {all, of_short, of_long}});
}

/// Changes fp32 values of a file to those elsewhere.
void RestoreValues(GgufPlace::Values kind, int64_t count, std::byte* values) {
  auto* const value = reinterpret_cast<float*>(values);
  for (int64_t i = 0; i < count; ++i) {
    value[i] = kind == GgufPlace::Values::kPlusOne
                   ? value[i] - 1.0F
                   : static_cast<float>(std::log(-static_cast<double>(value[i])));
  }
}

/// Whether values that are other ones elsewhere can be restored.
Status CheckValues(const GgufTensorList& list, const GgufFileTensor& tensor) {
  const bool changed = tensor.place.values != GgufPlace::Values::kSame;
  const bool floats = !tensor.stored.quantized() && tensor.stored.dtype == DType::kF32;
  if ((!changed && !tensor.place.taps) || floats) return {};
  return list.FailTensor(tensor, fmt::format("expected F32, got {}", tensor.stored.name));
}

bool IsInOut(const GgufTensorList& list, std::string_view name) {
  return list.naming().type == "gpt_oss" &&
         (name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj"));
}

/// Describes a quantized matrix, or a stack of them, of which `rows` are the rows.
Status Describe(const GgufTensorList& list, const GgufFileTensor& tensor, const GgufRows& rows,
                ModuleRecord* record, ModuleSource* source) {
  const Shape& dims = tensor.tensor->dims;
  const GgufFormat& format = *tensor.stored.format;
  record->module.name = tensor.place.name;
  record->module.layer_class = ClassifyTensor(tensor.place.name);
  record->stacked = dims.rank() == 3;
  record->layout = IsInOut(list, tensor.place.name) ? SourceLayout::kInOut : SourceLayout::kOutIn;
  WeightsSpec& spec = record->module.spec;
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
    return list.FailTensor(tensor, std::string(possible.message()));
  }
  source->stored = tensor.stored;
  source->spec = spec;
  if (rows.column_parts.empty()) return {};
  const int64_t run = spec.k / std::ssize(rows.column_parts);
  if (!CanMoveRuns(spec, run)) {
    return list.FailTensor(tensor, fmt::format("heads of {} columns are no whole groups of {}", run,
                                               format.group_size));
  }
  spec = MovedRunsSpec(spec, run);
  return {};
}

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
      GgufFileTensor other = tensor;
      for (const GgufPlace& place : tensor.others) {
        other.place = place;
        MARLIN_RETURN_IF_ERROR(AddTensor(other));
      }
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
    return PackGgufRows(source.rows, source.stored, source.spec, source.global_scale, pool_.Get());
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
    if (list_.naming().known()) {
      MARLIN_ASSIGN_OR_RETURN(config, ConfigOf(list_, &used_));
    } else if (!name.empty()) {
      config["model_type"] = std::string(name);
    }
    if (config.empty()) return {};
    return store_.SetConfig(DumpJson(config, 2) + "\n", store_.path);
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
    if (list_.naming().known()) {
      if (IsGgufPartner(list_, tensor)) return {};
      const GgufFileTensor* const values = GgufLatentPartner(list_, tensor);
      if (values != nullptr) return AddLatent(tensor, *values);
      const auto partner = GgufUpPartner(list_.naming(), tensor.tensor->name);
      if (partner) return AddJoined(tensor, *partner);
    }
    const Shape& dims = tensor.tensor->dims;
    if (tensor.place.experts && dims.rank() != 3 && tensor.place.name.ends_with(".weight")) {
      return list_.FailTensor(tensor,
                              fmt::format("expected a stack of experts, got {}", dims.ToString()));
    }
    GgufRows rows;
    rows.stacks = {list_.Data(tensor)};
    MARLIN_RETURN_IF_ERROR(list_.SetRows(tensor, &rows));
    MARLIN_RETURN_IF_ERROR(CheckValues(list_, tensor));
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
    const bool transposed = IsInOut(list_, name) && dims.rank() == 3;
    if (transposed) shape = {dims[0], dims[2], dims[1]};
    if (dims.rank() > 0 && !rows.places.empty()) shape[std::max(0, dims.rank() - 2)] = rows.rows;
    if (tensor.place.as_row && dims.rank() == 1) shape = {1, dims[0]};
    if (tensor.place.taps && dims.rank() == 2) shape = {dims[0], 1, dims[1]};
    const bool changed = tensor.place.values != GgufPlace::Values::kSame;
    StoreTensor(tensor, name, tensor.stored.dtype, shape, 0,
                rows.stored > 0 ? bytes / rows.stored * rows.rows : bytes);
    if (!rows.places.empty() || !rows.column_parts.empty() || transposed || changed) {
      ComputeCopy(tensor.place, rows, tensor.stored.bytes, transposed);
    }
    return {};
  }

  void ComputeCopy(const GgufPlace& place, const GgufRows& rows, int64_t element_bytes,
                   bool transposed) {
    computed_[place.name] = [rows, element_bytes, transposed,
                             values = place.values](std::byte* out) {
      CopyGgufRows(rows, element_bytes, transposed, out);
      if (values == GgufPlace::Values::kSame) return;
      RestoreValues(values, rows.experts * rows.rows * rows.row_bytes / element_bytes, out);
    };
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
    ModuleRecord record;
    ModuleSource source;
    MARLIN_RETURN_IF_ERROR(Describe(list_, tensor, rows, &record, &source));
    const WeightsSpec& spec = record.module.spec;
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

  /// A part keeps its name in the file, and the bytes of its blocks. Several modules may have it.
  void StorePart(const GgufFileTensor& tensor) {
    if (!stored_.insert(tensor.tensor->name).second) return;
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
      if (stored_.insert(scale.tensor->name).second) {
        StoreTensor(scale, std::string(scale.tensor->name), DType::kF32, scale.tensor->dims, 0,
                    scale.tensor->bytes);
      }
      source->parts.emplace_back(scale.tensor->name);
    }
    return {};
  }

  /// The one matrix that keys and values of MLA were made from.
  Status AddLatent(const GgufFileTensor& keys, const GgufFileTensor& values) {
    MARLIN_ASSIGN_OR_RETURN(GgufLatentPair pair, PairGgufLatent(list_, keys, values));
    StoreTensor(keys, pair.name, DType::kF32, pair.shape, 0, pair.bytes);
    computed_[pair.name] = [latent = std::move(pair.latent)](std::byte* out) {
      JoinGgufLatent(latent, reinterpret_cast<float*>(out));
    };
    return {};
  }

  /// Gate and up as one tensor.
  Status AddJoined(const GgufFileTensor& gate, const std::string& up) {
    MARLIN_ASSIGN_OR_RETURN(GgufRows rows, JoinGguf(list_, gate, up));
    if (gate.stored.quantized()) {
      return AddModule(gate, std::move(rows), &list_.tensors().find(up)->second);
    }
    const Shape& dims = gate.tensor->dims;
    const bool matrices = dims.rank() != 2;
    const bool transposed = matrices && IsInOut(list_, gate.place.name);
    Shape shape = {dims[0], rows.rows};
    if (matrices) shape.Append(dims[2]);
    if (transposed) shape = {dims[0], dims[2], rows.rows};
    StoreTensor(gate, gate.place.name, gate.stored.dtype, shape, 0, 2 * gate.tensor->bytes);
    ComputeCopy(gate.place, rows, gate.stored.bytes, transposed);
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
  std::set<std::string_view> stored_;            ///< Tensors that modules are loaded from.
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
