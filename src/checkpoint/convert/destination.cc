// Which recipes the programs that models are quantized for load: what the writer of their format
// holds, less the rows of kDestinationLimits.
#include "marlin/destination.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/quantize_plan.h"
#include "checkpoint/module_writer.h"

namespace marlin {
namespace {

constexpr std::array kDestinations = {
    Destination{"llama.cpp", "gguf", ".gguf", "s4/g32", false},
    Destination{"mlx-lm", "mlx", "", "s4/g64", true},
    Destination{"vllm", "compressed-tensors", "", "s4/g128", true},
    Destination{"transformers", "compressed-tensors", "", "s4/g128", true},
};
/// Groups for matrices that a destination's own do not divide.
constexpr std::array<int64_t, 3> kSmallerGroups = {64, 32, 16};

/// A module that a destination does not load, although the writer of its format holds it.
struct Limit {
  std::string_view destination;
  bool (*excludes)(const ModuleRecord& record);
  std::string_view why;
};

bool HasZeros(const ModuleRecord& record) { return record.module.spec.has_zeros; }

bool IsRotated(const ModuleRecord& record) { return record.module.spec.input_hadamard > 0; }

bool HasGroupsOfFp8(const ModuleRecord& record) {
  const WeightsSpec& spec = record.module.spec;
  return spec.format == Format::kFp8E4M3 && spec.group_size < spec.k;
}

bool HasCodebook(const ModuleRecord& record) {
  return GetFormatInfo(record.module.spec.format).has_codebook;
}

bool IsExpert(const ModuleRecord& record) {
  return record.module.layer_class == LayerClass::kMoeExpert;
}

bool HasSuchScales(const ModuleRecord& record, ScaleType type) {
  return record.module.spec.scale_type == type;
}

bool HasGlobalScale(const ModuleRecord& record) { return HasSuchScales(record, ScaleType::kE4M3); }

bool HasExponentScales(const ModuleRecord& record) {
  return HasSuchScales(record, ScaleType::kE8M0);
}

bool HasWideScales(const ModuleRecord& record) {
  return HasSuchScales(record, ScaleType::kF32) || HasSuchScales(record, ScaleType::kBf16);
}

bool IsWeightOnlyInteger(const ModuleRecord& record) {
  const WeightsSpec& spec = record.module.spec;
  const bool format = spec.format == Format::kS4 || spec.format == Format::kS8;
  const bool group = spec.group_size == 32 || spec.group_size == 64 || spec.group_size == 128 ||
                     spec.group_size >= spec.k;
  const bool scales =
      HasSuchScales(record, ScaleType::kF16) || HasSuchScales(record, ScaleType::kBf16);
  return format && group && scales && !spec.has_zeros;
}

constexpr Limit kDestinationLimits[] = {
    {"llama.cpp", HasZeros, "its types hold biases of fp16, which zeros of quantize seldom are"},
    {"llama.cpp", HasWideScales, "its scales are fp16"},
    {"llama.cpp", IsRotated, "rotated inputs are stored as F32"},
    {"mlx-lm", HasZeros, "it adds biases, and zeros of quantize seldom are such exactly"},
    {"mlx-lm", HasCodebook, "it computes values from codes, and has no codebooks"},
    {"mlx-lm", HasGlobalScale, "it has no global scale, and products with it are seldom e4m3"},
    {"vllm", [](const ModuleRecord& record) { return !IsWeightOnlyInteger(record); },
     "its kernels for compressed-tensors take s4 and s8 with fp16 or bf16 scales, in groups of 32, "
     "64 or 128 or one for all of k"},
    {"transformers",
     [](const ModuleRecord& record) { return IsExpert(record) && HasZeros(record); },
     "it reads experts without zeros"},
    {"transformers", HasGroupsOfFp8, "it reads fp8_e4m3 with one group for all of k"},
    {"transformers", HasExponentScales, "it makes bf16 weights of them, for models in bf16 alone"},
    {"transformers", HasGlobalScale,
     "it divides by a global scale, and the inverse of quantize's is seldom exact"},
};

/// A plan of quantizing a source, and its modules.
struct Planned {
  QuantizePlan plan;
  std::vector<ModuleRecord> records;
};

Result<Planned> PlanFor(const Checkpoint& source, const MixedPrecisionConfig& recipe) {
  QuantizeCheckpointOptions options;
  options.recipe = recipe;
  options.method = QuantizeMethod::kGptq;  // The one that takes every recipe.
  Planned planned;
  MARLIN_ASSIGN_OR_RETURN(planned.plan, PlanQuantize(CheckpointAccess::Get(source), options));
  for (const PlanUnit& unit : planned.plan.units) {
    if (unit.action == PlanUnit::Action::kQuantize) planned.records.push_back(unit.record);
  }
  return planned;
}

Status CheckRecord(const Destination& destination, const Checkpoint& source,
                   const ModuleRecord& record) {
  for (const Limit& limit : kDestinationLimits) {
    if (limit.destination != destination.name || !limit.excludes(record)) continue;
    return Status(Code::kUnsupported, std::string(limit.why));
  }
  return CheckModule(source, destination.target, record);
}

Status DoesNotLoad(const Destination& destination, const ModuleRecord& record, const Status& why) {
  const WeightsSpec& spec = record.module.spec;
  return Status(why.code(),
                fmt::format("module \"{}\": {} does not load {}{} in groups of {} with {} scales: "
                            "{}; without a recipe --for {} takes {}",
                            Printable(record.module.name), destination.name,
                            FormatName(spec.format), spec.has_zeros ? " with zeros" : "",
                            spec.group_size, ScaleTypeName(spec.scale_type), why.message(),
                            destination.name, destination.choice));
}

/// The type of scales that a program multiplies with weights of a source's type.
ScaleType ScalesOf(const Checkpoint& source) {
  for (const TensorInfo& tensor : source.tensors()) {
    if (!IsWeightMatrix(tensor.name, tensor.shape)) continue;
    if (tensor.dtype == DType::kF32) return ScaleType::kF32;
    return tensor.dtype == DType::kBf16 ? ScaleType::kBf16 : ScaleType::kF16;
  }
  return ScaleType::kF16;
}

/// mlx_lm splits this matrix of MLA and quantizes the halves again.
bool IsQuantizedAgain(const Destination& destination, const ModuleRecord& record) {
  return destination.name == "mlx-lm" && record.module.name.ends_with(".kv_b_proj.weight");
}

/// The choice for a matrix that the destination does not load in its usual groups.
FormatChoice SmallerChoice(const Destination& destination, const Checkpoint& source,
                           ModuleRecord record, FormatChoice choice) {
  if (IsQuantizedAgain(destination, record)) return FormatChoice();
  for (const int64_t group : kSmallerGroups) {
    if (group >= choice.group_size) continue;
    record.module.spec.group_size = group;
    if (!CheckRecord(destination, source, record).ok()) continue;
    choice.group_size = group;
    return choice;
  }
  return FormatChoice();
}

}  // namespace

std::span<const Destination> AllDestinations() { return kDestinations; }

Result<Destination> FindDestination(std::string_view name) {
  std::string known;
  for (const Destination& destination : kDestinations) {
    if (destination.name == name) return destination;
    known += known.empty() ? "" : ", ";
    known += destination.name;
  }
  return Status(Code::kInvalidArgument, fmt::format("unknown destination '{}'; known: {}",
                                                    Printable(std::string(name)), known));
}

Result<MixedPrecisionConfig> RecipeFor(const Destination& destination, const Checkpoint& source) {
  MARLIN_ASSIGN_OR_RETURN(FormatChoice choice, ParseFormatChoice(destination.choice));
  if (destination.name == "vllm" && ScalesOf(source) == ScaleType::kF32) {
    choice.scale_type = ScaleType::kF16;
  } else if (destination.source_scales) {
    choice.scale_type = ScalesOf(source);
  }
  MARLIN_ASSIGN_OR_RETURN(MixedPrecisionConfig recipe,
                          MixedPrecisionConfig::Uniform(choice.ToString()));
  recipe.set_name(fmt::format("for {}", destination.name));
  MARLIN_ASSIGN_OR_RETURN(const Planned planned, PlanFor(source, recipe));
  Status refused;
  bool any = false;
  for (const PlanUnit& unit : planned.plan.units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    const Status status = CheckRecord(destination, source, unit.record);
    any = any || status.ok();
    if (status.ok() && !IsQuantizedAgain(destination, unit.record)) continue;
    const FormatChoice other = SmallerChoice(destination, source, unit.record, choice);
    any = any || !other.keep;
    if (refused.ok()) refused = status;
    for (const size_t tensor : unit.sources) recipe.SetTensor(source.tensors()[tensor].name, other);
  }
  // What no matrix passes is no matter of groups: the model itself has no form there.
  if (!any && !refused.ok()) return refused.WithContext(Printable(source.path()));
  MARLIN_RETURN_IF_ERROR(CheckRecipeFor(destination, source, recipe));
  return recipe;
}

Status CheckRecipeFor(const Destination& destination, const Checkpoint& source,
                      const MixedPrecisionConfig& recipe) {
  MARLIN_ASSIGN_OR_RETURN(const Planned planned, PlanFor(source, recipe));
  for (const ModuleRecord& record : planned.records) {
    const Status status = CheckRecord(destination, source, record);
    if (!status.ok()) {
      return DoesNotLoad(destination, record, status).WithContext(Printable(source.path()));
    }
  }
  if (planned.records.empty()) {
    return Status(Code::kUnsupported, fmt::format("{}: {} loads none of its matrices quantized",
                                                  Printable(source.path()), destination.name));
  }
  return CheckConversion(source, destination.target, planned.records)
      .WithContext(fmt::format("--for {}", destination.name));
}

}  // namespace marlin
