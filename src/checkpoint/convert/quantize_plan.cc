#include "checkpoint/convert/quantize_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/macros.h"
#include "base/view_checks.h"
#include "checkpoint/codes/tiled_codes.h"
#include "checkpoint/decoder_names.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/source_layout.h"
#include "marlin/sensitivity.h"
#include "recipe/choice_options.h"
#include "recipe/expert_name.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

// Why a tensor that the recipe quantizes cannot be quantized; empty if it can.
std::string Obstacle(const TensorInfo& tensor, LayerClass layer_class) {
  const int rank = tensor.shape.rank();
  if (!IsFloat(tensor.dtype)) {
    return fmt::format("{} is not f32, bf16 or f16", DTypeName(tensor.dtype));
  }
  if (tensor.name.find('*') != std::string::npos) return "its name contains '*'";
  if (rank == 3 && layer_class != LayerClass::kMoeExpert) {
    return fmt::format("{} is not a stack of experts", tensor.shape.ToString());
  }
  if (rank != 2 && rank != 3) return fmt::format("{} dimensions", rank);
  if (tensor.bytes == 0) return "empty";
  return {};
}

/// Embeddings have no inputs to rotate. A layer's tokens are gathered once for all matrices of its
/// experts, shared ones and their gate among them, so that a layer would expand rotated ones.
bool MayRotateInputs(LayerClass layer_class, std::string_view name) {
  return layer_class != LayerClass::kMoeExpert && layer_class != LayerClass::kMoeSharedExpert &&
         layer_class != LayerClass::kEmbedding &&
         name.find(".shared_expert_gate.") == std::string_view::npos;
}

class Planner {
 public:
  Planner(const Checkpoint::Impl& source, const QuantizeCheckpointOptions& options)
      : source_(source), options_(options) {}

  Result<QuantizePlan> Run();

 private:
  struct Candidate {
    size_t tensor = 0;
    FormatChoice choice;
    LayerClass layer_class = LayerClass::kOther;
  };

  Status PlanTensor(size_t tensor);
  Status PlanStacks();
  Status CheckHotExperts() const;
  Status CheckTensors() const;
  Status AddModule(const Candidate& first, const std::string& name, std::vector<size_t> sources,
                   bool stacked);
  Status AddSingle(const Candidate& candidate);
  void AddCopy(size_t tensor);
  Status AddObstructed(size_t tensor, const std::string& obstacle);
  Status AddCast(const Candidate& candidate);
  bool IsStack(const std::map<int64_t, Candidate>& experts) const;
  const TensorInfo& Info(size_t tensor) const { return source_.tensors[tensor]; }

  const Checkpoint::Impl& source_;
  const QuantizeCheckpointOptions& options_;
  QuantizePlan plan_;
  std::map<std::string, std::map<int64_t, Candidate>> experts_;  // By common name and number.
  std::map<std::string, int64_t> expert_counts_;                 // Experts in the source, by name.
};

void Planner::AddCopy(size_t tensor) {
  const TensorInfo& info = Info(tensor);
  PlanUnit unit;
  unit.sources = {tensor};
  unit.outputs = {{StoredName(source_, info.name), info.dtype, info.shape, info.bytes}};
  plan_.units.push_back(std::move(unit));
}

// A matrix that the recipe quantizes but that cannot be quantized.
Status Planner::AddObstructed(size_t tensor, const std::string& obstacle) {
  const std::string& name = Info(tensor).name;
  if (options_.strict) {
    return Status(Code::kUnsupported,
                  fmt::format("{}: tensor \"{}\": cannot be quantized: {}", Printable(source_.path),
                              Printable(name), obstacle));
  }
  plan_.skipped.push_back({name, obstacle});
  AddCopy(tensor);
  return {};
}

Status Planner::AddCast(const Candidate& candidate) {
  const TensorInfo& info = Info(candidate.tensor);
  const DType dtype = UnquantizedDType(candidate.choice.format);
  if (info.dtype == dtype) {
    AddCopy(candidate.tensor);
    return {};
  }
  PlanUnit unit;
  unit.action = PlanUnit::Action::kCast;
  unit.sources = {candidate.tensor};
  unit.choice = candidate.choice;
  unit.outputs = {{StoredName(source_, info.name), dtype, info.shape,
                   info.shape.ElementCount() * DTypeBytes(dtype)}};
  plan_.units.push_back(std::move(unit));
  return {};
}

Status Planner::AddModule(const Candidate& first, const std::string& name,
                          std::vector<size_t> sources, bool stacked) {
  const TensorInfo& info = Info(first.tensor);
  const int rank = info.shape.rank();
  PlanUnit unit;
  unit.action = PlanUnit::Action::kQuantize;
  unit.choice = first.choice;
  unit.record.module.name = name;
  unit.record.module.layer_class = first.layer_class;
  unit.record.stacked = stacked;
  const Result<SourceLayout> layout = SourceLayoutOf(source_, info);
  if (!layout.ok()) return AddObstructed(first.tensor, layout.status().message());
  unit.record.layout = *layout;
  int64_t k = info.shape[rank - 1];
  int64_t n = info.shape[rank - 2];
  if (unit.record.layout == SourceLayout::kInOut) std::swap(k, n);
  // Quantizing zero columns is free, checks the options and yields the spec.
  QuantizeOptions quantize = OptionsFor(first.choice, QuantizeMethod::kRtn, info.name);
  Result<QuantizedWeights> empty = Quantize(TensorView(nullptr, info.dtype, {k, 0}), quantize);
  if (!empty.ok()) {
    return empty.status().WithContext(fmt::format("tensor \"{}\"", Printable(info.name)));
  }
  WeightsSpec& spec = unit.record.module.spec;
  spec = empty->spec;
  if (spec.input_hadamard > 0 && !UsesGptq(options_.method)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("tensor \"{}\": {} has Hadamard blocks, which need method gptq or "
                              "awq+gptq: rounding alone loses more with them than without",
                              Printable(info.name), first.choice.ToString()));
  }
  spec.n = n;
  spec.experts = rank == 3 ? info.shape[0] : static_cast<int64_t>(sources.size());
  if (HasTiledLayout(spec)) unit.record.codes = options_.layout;
  ModuleRecord stored = unit.record;
  stored.module.name = StoredName(source_, name);
  for (ModuleTensor& tensor : ModuleTensors(stored)) {
    if (static_cast<int64_t>(tensor.name.size()) > kMaxNameBytes) {
      const std::string obstacle =
          fmt::format("one of its parts would have a name of {} bytes, at most {} are read",
                      tensor.name.size(), kMaxNameBytes);
      for (const size_t source : sources) MARLIN_RETURN_IF_ERROR(AddObstructed(source, obstacle));
      return {};
    }
    unit.outputs.push_back({std::move(tensor.name), tensor.dtype, tensor.shape, tensor.bytes});
  }
  for (const size_t source : sources) {
    plan_.quantized_parameters += Info(source).shape.ElementCount();
  }
  plan_.quantized_bytes += CodeAndScaleBytes(spec);
  unit.sources = std::move(sources);
  plan_.units.push_back(std::move(unit));
  return {};
}

Status Planner::AddSingle(const Candidate& candidate) {
  const TensorInfo& info = Info(candidate.tensor);
  return AddModule(candidate, info.name, {candidate.tensor}, info.shape.rank() == 3);
}

Status Planner::PlanTensor(size_t tensor) {
  const TensorInfo& info = Info(tensor);
  const std::optional<ExpertName> expert = ParseExpertName(info.name);
  if (expert) ++expert_counts_[expert->common];
  Candidate candidate{tensor, options_.recipe.Choose(info.name, info.shape),
                      ClassifyTensor(info.name)};
  if (!MayRotateInputs(candidate.layer_class, info.name)) candidate.choice.input_hadamard = 0;
  if (candidate.choice.keep) {
    if (info.shape.rank() >= 2 && info.bytes > 0) {
      plan_.skipped.push_back(
          {info.name, fmt::format("the recipe keeps {}", LayerClassName(candidate.layer_class))});
    }
    AddCopy(tensor);
    return {};
  }
  const std::string obstacle = Obstacle(info, candidate.layer_class);
  if (!obstacle.empty()) return AddObstructed(tensor, obstacle);
  if (!GetFormatInfo(candidate.choice.format).quantized) return AddCast(candidate);
  if (info.shape.rank() == 2 && expert) {
    experts_[expert->common][expert->expert] = candidate;
    return {};
  }
  return AddSingle(candidate);
}

bool Planner::IsStack(const std::map<int64_t, Candidate>& experts) const {
  const Candidate& first = experts.begin()->second;
  int64_t next = 0;
  for (const auto& [number, candidate] : experts) {
    if (number != next++) return false;
    if (!(Info(candidate.tensor).shape == Info(first.tensor).shape)) return false;
    if (!(candidate.choice == first.choice)) return false;
  }
  return true;
}

Status Planner::PlanStacks() {
  for (const auto& [common, experts] : experts_) {
    // A stack must hold every expert: readers look for all of them in it.
    const bool all = static_cast<int64_t>(experts.size()) == expert_counts_.at(common);
    if (all && IsStack(experts)) {
      std::vector<size_t> sources;
      for (const auto& [number, candidate] : experts) sources.push_back(candidate.tensor);
      MARLIN_RETURN_IF_ERROR(AddModule(experts.begin()->second, common, std::move(sources), true));
      continue;
    }
    for (const auto& [number, candidate] : experts) MARLIN_RETURN_IF_ERROR(AddSingle(candidate));
  }
  return {};
}

Status Planner::CheckHotExperts() const {
  if (!options_.recipe.hot_experts()) return {};
  // Layers beyond these predict further tokens; no text was routed through them.
  const Json config = TextValues(source_.config());
  const Json layers = config.is_object() ? config.value("num_hidden_layers", Json()) : Json();
  const int64_t count = layers.is_number_unsigned() ? layers.get<int64_t>() : INT64_MAX;
  std::vector<TensorShape> tensors;
  for (const TensorInfo& info : source_.tensors) {
    const std::optional<ExpertPlace> place = ParseExpertPlace(info.name);
    if (!place || place->layer < count) tensors.push_back({info.name, info.shape});
  }
  return options_.recipe.CheckHotExperts(TextModelType(source_.config()), tensors);
}

Status Planner::CheckTensors() const {
  std::vector<TensorShape> tensors;
  for (const TensorInfo& info : source_.tensors) tensors.push_back({info.name, info.shape});
  return options_.recipe.CheckTensors(tensors);
}

Result<QuantizePlan> Planner::Run() {
  MARLIN_RETURN_IF_ERROR(CheckHotExperts());
  MARLIN_RETURN_IF_ERROR(CheckTensors());
  for (size_t i = 0; i < source_.tensors.size(); ++i) {
    plan_.parameters += Info(i).shape.ElementCount();
    MARLIN_RETURN_IF_ERROR(PlanTensor(i));
  }
  MARLIN_RETURN_IF_ERROR(PlanStacks());
  // In file order, so that every file is read once, front to back.
  const auto place = [this](const PlanUnit& unit) {
    const size_t tensor = unit.sources.front();
    return std::pair(source_.tensor_file[tensor], Info(tensor).offset);
  };
  std::stable_sort(plan_.units.begin(), plan_.units.end(),
                   [&place](const PlanUnit& a, const PlanUnit& b) { return place(a) < place(b); });
  for (const PlanUnit& unit : plan_.units) {
    for (const OutputTensor& tensor : unit.outputs) plan_.bytes += tensor.bytes;
  }
  return std::move(plan_);
}

}  // namespace

QuantizeOptions OptionsFor(const FormatChoice& choice, QuantizeMethod method,
                           const std::string& tensor_name) {
  QuantizeOptions options = QuantizeOptionsOf(choice);
  options.method = NeedsCalibration(method) ? QuantizeMethod::kMse : method;
  options.tensor_name = Printable(tensor_name);
  return options;
}

Result<QuantizePlan> PlanQuantize(const Checkpoint::Impl& source,
                                  const QuantizeCheckpointOptions& options) {
  return Planner(source, options).Run();
}

}  // namespace marlin
