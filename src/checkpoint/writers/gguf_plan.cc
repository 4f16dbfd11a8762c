#include "checkpoint/writers/gguf_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/source_layout.h"
#include "checkpoint/writers/gguf_metadata.h"
#include "checkpoint/writers/gguf_parts.h"
#include "checkpoint/writers/gguf_super_blocks.h"
#include "layout/input_transform.h"
#include "layout/plain_weights.h"
#include "recipe/decoder_tensors.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

constexpr size_t kMostNameBytes = 63;
constexpr size_t kMostShards = 65535;  // split.count has 16 bits.
constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kExperts = ".experts.";

/// "a.experts.7.b" as "a.experts.*.b", and 7.
std::optional<int64_t> TakeExpert(std::string* name) {
  const size_t at = name->find(kExperts);
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + kExperts.size();
  const size_t end = name->find('.', begin);
  if (end == std::string::npos || end == begin || end - begin > 6) return std::nullopt;
  int64_t number = 0;
  for (size_t i = begin; i < end; ++i) {
    const char digit = (*name)[i];
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + (digit - '0');
  }
  name->replace(begin, end - begin, "*");
  return number;
}

/// Assigns consecutive tensors to files, and places in them.
void CutShards(int64_t shard_bytes, GgufPlan* plan) {
  plan->shards = {GgufShard()};
  int64_t offset = 0;
  for (size_t i = 0; i < plan->outputs.size(); ++i) {
    const int64_t bytes = RoundUp(plan->outputs[i].bytes, kGgufAlignment);
    if (shard_bytes > 0 && offset > 0 && bytes > shard_bytes - offset) {
      plan->shards.push_back({{}, i, i, {}});
      offset = 0;
    }
    plan->outputs[i].offset = offset;
    offset += bytes;
    plan->shards.back().end = i + 1;
  }
}

std::string ShardHeader(const std::vector<GgufOutput>& outputs, const GgufShard& shard,
                        const GgufMetadataBuilder& metadata) {
  std::string infos;
  for (size_t number = shard.first; number < shard.end; ++number) {
    const GgufOutput& output = outputs[number];
    AppendGgufText(output.name, &infos);
    AppendGgufNumber(static_cast<uint32_t>(output.dims.rank()), &infos);
    // The file lists the contiguous dimension first.
    for (int i = output.dims.rank(); i-- > 0;) {
      AppendGgufNumber(static_cast<uint64_t>(output.dims[i]), &infos);
    }
    AppendGgufNumber(output.type.id, &infos);
    AppendGgufNumber(static_cast<uint64_t>(output.offset), &infos);
  }
  std::string header;
  AppendGgufStart(shard.end - shard.first, metadata.count(), &header);
  header += metadata.bytes() + infos;
  header.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(header.size()), kGgufAlignment)));
  return header;
}

Status LayOut(const std::string& path, const GgufMetadataBuilder& metadata_of_model,
              int64_t shard_bytes, GgufPlan* plan) {
  CutShards(shard_bytes, plan);
  if (plan->shards.size() > kMostShards) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: {} shards of {} bytes, gguf has at most {}", Printable(path),
                              plan->shards.size(), shard_bytes, kMostShards));
  }
  for (size_t i = 0; i < plan->shards.size(); ++i) {
    GgufMetadataBuilder metadata;
    if (i == 0) metadata = metadata_of_model;
    if (shard_bytes > 0) {
      plan->shards[i].name = fmt::format("model-{:05}-of-{:05}.gguf", i + 1, plan->shards.size());
      metadata.Split(static_cast<uint16_t>(i), static_cast<uint16_t>(plan->shards.size()),
                     static_cast<int32_t>(plan->outputs.size()));
    }
    plan->shards[i].header = ShardHeader(plan->outputs, plan->shards[i], metadata);
  }
  return {};
}

/// A file of the source as a JSON object; null: it has none.
Result<Json> ReadObject(const Checkpoint& checkpoint, const std::string& name) {
  MARLIN_ASSIGN_OR_RETURN(const std::optional<std::string> text, checkpoint.ReadFile(name));
  if (!text) return Json();
  constexpr JsonLimits kLimits{int64_t{256} << 20, int64_t{1} << 24};
  return ParseJsonObject(*text, Printable(name), kLimits);
}

class GgufPlanner {
 public:
  GgufPlanner(const Checkpoint& checkpoint, int64_t shard_bytes)
      : checkpoint_(checkpoint),
        source_(CheckpointAccess::Get(checkpoint)),
        shard_bytes_(shard_bytes) {}

  Result<GgufPlan> Plan() {
    MARLIN_ASSIGN_OR_RETURN(
        facts_, DescribeGgufModel(source_.config_json, Printable(source_.path), &metadata_));
    for (const ModuleRecord& record : source_.reader->modules()) {
      if (LeaveOut(record.module.name)) continue;
      MARLIN_RETURN_IF_ERROR(InModule(record, PlanModule(record)));
    }
    MARLIN_RETURN_IF_ERROR(PlanPlain());
    std::stable_sort(
        plan_.outputs.begin(), plan_.outputs.end(),
        [this](const GgufOutput& a, const GgufOutput& b) { return Place(a) < Place(b); });
    for (const auto& [name, values] : facts_.rope_factors) {
      GgufOutput factors;
      factors.name = name;
      factors.dims = {static_cast<int64_t>(values.size())};
      factors.values = values;
      MARLIN_RETURN_IF_ERROR(Add(std::move(factors), *FindGgufType(DType::kF32)));
    }
    MARLIN_RETURN_IF_ERROR(AddTokenizer());
    MARLIN_RETURN_IF_ERROR(LayOut(source_.path, metadata_, shard_bytes_, &plan_));
    return std::move(plan_);
  }

  /// Whether modules have a form in the file, judged by their records.
  Status Check(std::span<const ModuleRecord> records) {
    MARLIN_ASSIGN_OR_RETURN(
        facts_, DescribeGgufModel(source_.config_json, Printable(source_.path), &metadata_));
    for (const ModuleRecord& record : records) {
      if (LeaveOut(record.module.name)) continue;
      const WeightsSpec& spec = record.module.spec;
      if (!HoldsStack(record)) MARLIN_RETURN_IF_ERROR(CheckForeignLayout(record));
      MARLIN_RETURN_IF_ERROR(GgufOutputsOf(facts_, record.module.name, spec.n).status());
      const WeightsSpec stored = TransformsInput(spec) ? FoldedSpec(spec) : FlatSpec(spec);
      MARLIN_RETURN_IF_ERROR(GgufTypeOf(stored).status());
    }
    return {};
  }

 private:
  Status InModule(const ModuleRecord& record, const Status& status) const {
    return InGgufSource(checkpoint_, "module", record.module.name, status);
  }
  Status InTensor(size_t tensor, const Status& status) const {
    return InGgufSource(checkpoint_, "tensor", source_.tensors[tensor].name, status);
  }

  std::pair<uint32_t, int64_t> Place(const GgufOutput& output) const {
    const size_t tensor = output.record != nullptr
                              ? source_.reader->Parts(*output.record).front().tensor
                              : output.tensors.front();
    return {source_.tensor_file[tensor], source_.tensors[tensor].offset};
  }

  Status Add(GgufOutput output, const GgufStored& type) {
    output.type = type;
    output.bytes = output.dims.ElementCount() / type.elements * type.bytes;
    if (output.name.size() > kMostNameBytes) {
      return Status(Code::kUnsupported,
                    fmt::format("gguf cannot hold the name {} of {} bytes, at most {}",
                                Printable(output.name), output.name.size(), kMostNameBytes));
    }
    if (!names_.insert(output.name).second) {
      return Status(Code::kMalformedFile,
                    fmt::format("two tensors would both be \"{}\"", Printable(output.name)));
    }
    plan_.parameters += output.dims.ElementCount();
    plan_.outputs.push_back(std::move(output));
    return {};
  }

  /// Whether a module has all experts in one tensor, as this type's files hold them, too: gpt-oss
  /// has [in, out].
  bool HoldsStack(const ModuleRecord& record) const {
    const std::vector<GgufTensorOf> found = GgufTensorsOf(facts_.naming, record.module.name);
    const bool in_out = record.layout == SourceLayout::kInOut;
    return record.stacked && !found.empty() && found.front().place.one_stack &&
           (!in_out || facts_.naming.type == "gpt_oss");
  }

  Status PlanModule(const ModuleRecord& record) {
    if (!HoldsStack(record)) MARLIN_RETURN_IF_ERROR(CheckForeignLayout(record));
    const WeightsSpec& spec = record.module.spec;
    MARLIN_ASSIGN_OR_RETURN(const std::vector<GgufOutput> outputs,
                            GgufOutputsOf(facts_, record.module.name, spec.n));
    for (GgufOutput output : outputs) {
      output.record = &record;
      if (record.stacked) output.dims.Append(spec.experts);
      output.dims.Append(output.rows);
      output.dims.Append(spec.k);
      MARLIN_ASSIGN_OR_RETURN(const GgufStored type, TypeOf(record, output));
      MARLIN_RETURN_IF_ERROR(PlanPart(record, std::move(output), type));
    }
    return {};
  }

  Result<GgufStored> TypeOf(const ModuleRecord& record, const GgufOutput& output) const {
    const WeightsSpec& spec = record.module.spec;
    // No type has groups that lie across k, or scales or rotates its inputs.
    if (TransformsInput(spec)) return GgufTypeOf(FoldedSpec(spec));
    // Whether a type with two levels of scales holds them is seen in the numbers only.
    if (spec.super_group_size > 0) {
      MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights stored,
                              checkpoint_.Weights(record.module.name));
      MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, GgufColumns(output, stored));
      const GgufStored* const type = FindSuperType(weights.spec);
      const bool held = type != nullptr && HoldsSuperBlocks(*type, weights);
      for (const PartTensor& part : source_.reader->Parts(record)) source_.Release(part.tensor);
      if (held) return *type;
    }
    return GgufTypeOf(FlatSpec(spec));
  }

  Status PlanPart(const ModuleRecord& record, GgufOutput output, const GgufStored& type) {
    const WeightsSpec& spec = record.module.spec;
    if (spec.has_global_scale && type.quantized()) {
      GgufOutput factors;
      factors.record = &record;
      factors.name = output.name.substr(0, output.name.size() - kWeight.size()) + ".scale";
      factors.dims = {spec.experts};
      factors.global_scale = true;
      MARLIN_RETURN_IF_ERROR(Add(std::move(factors), *FindGgufType(DType::kF32)));
    }
    return Add(std::move(output), type);
  }

  /// Experts with a tensor each become a stack.
  Status PlanPlain() {
    std::map<std::string, std::map<int64_t, size_t>> stacks;
    for (size_t i = 0; i < source_.tensors.size(); ++i) {
      if (source_.is_part[i]) continue;
      std::string name = source_.tensors[i].name;
      // Models compute these from their configuration.
      if (name.ends_with(".rotary_emb.inv_freq")) continue;
      if (LeaveOut(name)) continue;
      if (const std::optional<int64_t> expert = TakeExpert(&name)) {
        stacks[name][*expert] = i;
      } else {
        MARLIN_RETURN_IF_ERROR(InTensor(i, PlanTensor(name, {i}, false)));
      }
    }
    for (const auto& [name, experts] : stacks) {
      std::vector<size_t> tensors;
      for (const auto& [expert, tensor] : experts) {
        const TensorInfo& first = source_.tensors[experts.begin()->second];
        const TensorInfo& own = source_.tensors[tensor];
        if (expert != static_cast<int64_t>(tensors.size()) || !(own.shape == first.shape) ||
            own.dtype != first.dtype) {
          return InTensor(tensor, Status(Code::kMalformedFile,
                                         fmt::format("expert {} of {}: numbers, shapes and types "
                                                     "of experts must agree",
                                                     tensors.size(), experts.size())));
        }
        tensors.push_back(tensor);
      }
      MARLIN_RETURN_IF_ERROR(InTensor(tensors.front(), PlanTensor(name, tensors, true)));
    }
    return {};
  }

  /// Whether a tensor or module is no part of the text model, or of a module that predicts further
  /// tokens, which llama.cpp's converter leaves out, too. The plan notes it.
  bool LeaveOut(const std::string& name) {
    const bool predicts = name.starts_with(kPredictionPrefix);
    const bool multimodal = IsMultimodal(source_.config());
    const std::string part(predicts     ? kPredictionPrefix.substr(0, kPredictionPrefix.size() - 1)
                           : multimodal ? OtherPart(name)
                                        : std::string_view());
    if (part.empty()) return false;
    const auto noted = [&](const SkippedTensor& file) { return file.name == part; };
    if (std::none_of(plan_.files.begin(), plan_.files.end(), noted)) {
      plan_.files.push_back({part, "gguf holds the text model's layers alone"});
    }
    return true;
  }

  Status PlanTensor(const std::string& name, const std::vector<size_t>& tensors, bool stacked) {
    const TensorInfo& info = source_.tensors[tensors.front()];
    const int rank = info.shape.rank();
    const std::vector<GgufTensorOf> found = GgufTensorsOf(facts_.naming, name);
    const GgufPlace place = found.empty() ? GgufPlace() : found.front().place;
    if (place.one_stack) return PlanStack(name, tensors.front());
    MARLIN_ASSIGN_OR_RETURN(const std::vector<GgufOutput> outputs,
                            GgufOutputsOf(facts_, name, rank == 0 ? 1 : info.shape[0]));
    if (place.experts != stacked) {
      return Status(Code::kUnsupported,
                    "one tensor for all experts has no form in gguf, which has one for each "
                    "projection");
    }
    const bool taps = place.taps && (rank != 3 || info.shape[1] != 1);
    const bool row = place.as_row && (rank != 2 || info.shape[0] != 1);
    if (rank > (stacked ? 2 : 4) || row || taps) {
      return Status(Code::kUnsupported, "gguf cannot hold the shape " + info.shape.ToString());
    }
    for (GgufOutput output : outputs) {
      output.tensors = tensors;
      if (stacked) output.dims.Append(static_cast<int64_t>(tensors.size()));
      if (rank > 0 && !place.as_row) output.dims.Append(output.rows);
      for (int i = place.taps ? 2 : 1; i < rank; ++i) output.dims.Append(info.shape[i]);
      const bool widened =
          output.dims.rank() < 2 || place.taps || ClassifyTensor(name) == LayerClass::kMoeRouter;
      MARLIN_RETURN_IF_ERROR(AddPlain(std::move(output), info.dtype, widened));
    }
    return {};
  }

  /// Experts in one tensor, matrices [experts, out, in], of gpt-oss [experts, in, out], or biases
  /// [experts, out].
  Status PlanStack(const std::string& name, size_t tensor) {
    const TensorInfo& info = source_.tensors[tensor];
    const int rank = info.shape.rank();
    const bool biases = rank == 2 && name.ends_with("bias");
    MARLIN_ASSIGN_OR_RETURN(const SourceLayout layout, SourceLayoutOf(source_, info));
    const bool fused = biases || layout == SourceLayout::kInOut;
    if (rank != 3 && !biases) {
      return Status(Code::kUnsupported, "gguf cannot hold the shape " + info.shape.ToString());
    }
    const int of_rows = fused ? rank - 1 : 1;
    MARLIN_ASSIGN_OR_RETURN(const std::vector<GgufOutput> outputs,
                            GgufOutputsOf(facts_, name, info.shape[of_rows]));
    for (GgufOutput output : outputs) {
      output.tensors = {tensor};
      output.in_out = fused;
      output.dims = {info.shape[0], output.rows};
      if (rank == 3) output.dims.Append(info.shape[3 - of_rows]);
      MARLIN_RETURN_IF_ERROR(AddPlain(std::move(output), info.dtype, rank == 2));
    }
    return {};
  }

  /// Adds a tensor of plain values, with `widened` in fp32 if they are floats.
  Status AddPlain(GgufOutput output, DType dtype, bool widened) {
    const bool is_float = dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBf16;
    const GgufStored* const type = FindGgufType(is_float && widened ? DType::kF32 : dtype);
    if (type == nullptr) {
      return Status(Code::kUnsupported,
                    fmt::format("gguf cannot hold {} elements", DTypeName(dtype)));
    }
    return Add(std::move(output), *type);
  }

  Status AddTokenizer() {
    const auto embedding = names_.find("token_embd.weight");
    const auto* const output =
        embedding == names_.end()
            ? nullptr
            : &*std::find_if(plan_.outputs.begin(), plan_.outputs.end(),
                             [&](const GgufOutput& one) { return one.name == *embedding; });
    constexpr const char* kFile = "tokenizer.json";
    const Result<Json> tokenizer = ReadObject(checkpoint_, kFile);
    Result<Json> config = ReadObject(checkpoint_, "tokenizer_config.json");
    // A chat template in a file of its own has precedence.
    MARLIN_ASSIGN_OR_RETURN(const std::optional<std::string> chat,
                            checkpoint_.ReadFile("chat_template.jinja"));
    if (chat && config.ok()) (*config)["chat_template"] = *chat;
    MARLIN_ASSIGN_OR_RETURN(const Json generation,
                            ReadObject(checkpoint_, "generation_config.json"));
    DescribeGgufSampling(generation, &metadata_);
    std::string obstacle;
    if (!tokenizer.ok() || !config.ok()) {
      obstacle = (tokenizer.ok() ? config : tokenizer).status().message();
    } else if (tokenizer->is_null()) {
      obstacle = "the source has none";
    } else if (output == nullptr || output->dims.rank() != 2) {
      obstacle = "the source has no embedding";
    } else {
      obstacle = DescribeGgufTokenizer({*tokenizer, *config, source_.config(), generation},
                                       output->dims[0], &metadata_);
    }
    if (obstacle.empty()) return {};
    plan_.files.push_back({kFile, obstacle});
    DescribeGgufTokenNumbers(source_.config(), generation, &metadata_);
    return {};
  }

  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;
  const int64_t shard_bytes_;
  GgufModelFacts facts_;
  GgufMetadataBuilder metadata_;
  std::set<std::string> names_;
  GgufPlan plan_;
};

}  // namespace

Status InGgufSource(const Checkpoint& checkpoint, std::string_view what, const std::string& name,
                    const Status& status) {
  if (status.ok()) return status;
  return status.WithContext(
      fmt::format("{}: {} \"{}\"", Printable(checkpoint.path()), what, Printable(name)));
}

Result<GgufPlan> PlanGguf(const Checkpoint& checkpoint, int64_t shard_bytes) {
  return GgufPlanner(checkpoint, shard_bytes).Plan();
}

CheckContainer CheckGguf;

Status CheckGguf(const Checkpoint& source, std::span<const ModuleRecord> records) {
  return GgufPlanner(source, 0).Check(records);
}

}  // namespace marlin
