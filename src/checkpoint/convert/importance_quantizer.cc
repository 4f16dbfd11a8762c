// Quantizes a checkpoint with the importance of its matrices' inputs.
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/matrix_quantizer.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/readers/gguf/gguf_row_places.h"
#include "marlin/importance.h"
#include "quantize/quantizer.h"
#include "recipe/expert_name.h"
#include "recipe/typed_config.h"

namespace marlin {
namespace {

class ImportanceQuantizer final : public MatrixQuantizer {
 public:
  ImportanceQuantizer(Checkpoint source, const ImportanceMatrix& importance)
      : checkpoint_(std::move(source)), importance_(importance), pool_(0) {}

  Status Begin(QuantizePlan* plan) override;
  std::string Identity() const override {
    return fmt::format("importance {:016x}", ChecksumOf(importance_.ToGguf("")));
  }
  marlin::Result<std::optional<Result>> Quantize(size_t tensor, int64_t expert) override;
  const std::vector<SkippedTensor>& fallbacks() const override { return fallbacks_; }
  bool Calibrates(size_t tensor, int64_t expert) const override {
    return !unweighted_.contains({source().tensors[tensor].name, expert});
  }

 private:
  const Checkpoint::Impl& source() const { return CheckpointAccess::Get(checkpoint_); }
  marlin::Result<std::span<const float>> InputsOf(const std::string& name, int64_t expert,
                                                  int64_t k);
  std::span<const float> Unknown(const std::string& name, int64_t expert, const char* reason);

  Checkpoint checkpoint_;
  const ImportanceMatrix& importance_;
  ThreadPool pool_;
  GgufNaming naming_;
  GgufHeads heads_;
  std::vector<float> moved_;                 ///< Inputs whose order in the matrix is another.
  std::map<size_t, const PlanUnit*> units_;  ///< By source tensor.
  std::vector<SkippedTensor> fallbacks_;
  std::set<std::pair<std::string, int64_t>> unweighted_;  ///< The same, by tensor and expert.
};

Status ImportanceQuantizer::Begin(QuantizePlan* plan) {
  const Json& config = source().config();
  const Json type = config.is_object() ? config.value("model_type", Json()) : Json();
  const std::string model_type = type.is_string() ? type.get<std::string>() : "";
  naming_ = GgufNamingOf(model_type);
  if (!naming_.known()) {
    return Status(Code::kUnsupported,
                  fmt::format("importance: GGUF has no names for the tensors of model_type '{}'",
                              Printable(model_type)));
  }
  if (naming_.architecture->tiled_values) {
    MARLIN_ASSIGN_OR_RETURN(
        TypedConfig typed,
        ReadTypedConfig(ModelConfig::Of(config, "config.json"), UnknownKeys::kIgnore));
    MARLIN_ASSIGN_OR_RETURN(const Dimensions sizes, ReadDimensions(*typed.family, typed.config));
    heads_ = GgufDeltaHeads(sizes);
  }
  for (const PlanUnit& unit : plan->units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    for (const size_t tensor : unit.sources) units_[tensor] = &unit;
  }
  return {};
}

std::span<const float> ImportanceQuantizer::Unknown(const std::string& name, int64_t expert,
                                                    const char* reason) {
  fallbacks_.push_back({expert < 0 ? name : fmt::format("{}[{}]", name, expert), reason});
  unweighted_.emplace(name, expert);
  return {};
}

/// The mean squares of a matrix's inputs [k]; empty: none are known.
marlin::Result<std::span<const float>> ImportanceQuantizer::InputsOf(const std::string& name,
                                                                     int64_t expert, int64_t k) {
  const std::optional<ExpertName> own = ParseExpertName(name);
  const std::vector<GgufTensorOf> stored =
      GgufTensorsOf(naming_, own ? std::string_view(own->common) : name);
  const auto found =
      stored.empty() ? importance_.inputs.end() : importance_.inputs.find(stored.front().name);
  if (found == importance_.inputs.end()) {
    return Unknown(name, expert, "unweighted: it is not in the importance matrix");
  }
  const ImportanceMatrix::Inputs& inputs = found->second;
  const int64_t number = own ? own->expert : std::max<int64_t>(expert, 0);
  const bool experts = own.has_value() || expert >= 0;
  // The older files do not tell the experts of a stack.
  const bool joined = experts && inputs.experts == 1 && inputs.k > k && inputs.k % k == 0;
  const int64_t count = joined ? inputs.k / k : inputs.experts;
  if ((!joined && inputs.k != k) || number >= count || (!experts && count != 1)) {
    return Invalid(fmt::format(
        "importance of another model: \"{}\" has {} experts with {} inputs, "
        "\"{}\" is number {} with {}",
        Printable(stored.front().name), count, joined ? k : inputs.k, Printable(name), number, k));
  }
  const std::span<const float> row =
      std::span(inputs.mean_squares)
          .subspan(static_cast<size_t>(number * k), static_cast<size_t>(k));
  const float tokens = inputs.counts[joined ? 0 : static_cast<size_t>(number)];
  if (tokens == 0.0F || std::all_of(row.begin(), row.end(), [](float v) { return v == 0.0F; })) {
    return Unknown(name, expert, "unweighted: no token was seen");
  }
  const GgufPlace& place = stored.front().place;
  if (!place.value_columns) return row;
  moved_.resize(row.size());
  for (int64_t i = 0; i < k; ++i) {
    moved_[static_cast<size_t>(i)] = row[static_cast<size_t>(GgufColumn(place, heads_, k, i))];
  }
  return std::span<const float>(moved_);
}

marlin::Result<std::optional<MatrixQuantizer::Result>> ImportanceQuantizer::Quantize(
    size_t tensor, int64_t expert) {
  const PlanUnit& unit = *units_.at(tensor);
  const std::string& name = source().tensors[tensor].name;
  MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded, LoadedTensor::Load(source(), tensor));
  TensorView matrix = MatrixOf(loaded.view(), expert);
  if (unit.record.layout == SourceLayout::kOutIn) matrix = matrix.Transposed();
  MARLIN_ASSIGN_OR_RETURN(const std::span<const float> inputs,
                          InputsOf(name, expert, matrix.dim(0)));
  const QuantizeOptions options = OptionsFor(unit.choice, QuantizeMethod::kMse, name);
  QuantizeReport report;
  Result result;
  MARLIN_ASSIGN_OR_RETURN(result.weights,
                          QuantizeWeightedOn(pool_, matrix, options, inputs, &report));
  result.zeroed_groups = report.zeroed_groups;
  return std::optional<Result>(std::move(result));
}

}  // namespace

Result<QuantizeCheckpointReport> QuantizeWithImportance(const std::string& source,
                                                        const std::string& output,
                                                        const QuantizeCheckpointOptions& options,
                                                        const ImportanceMatrix& importance) {
  if (options.method != QuantizeMethod::kMse) {
    return Invalid(fmt::format("method {}: uses no importance matrix; mse does",
                               QuantizeMethodName(options.method)));
  }
  SystemIo io;
  MARLIN_ASSIGN_OR_RETURN(Checkpoint checkpoint,
                          CheckpointAccess::Open(io, source, {options.allow_extra_tensors}));
  try {
    ImportanceQuantizer quantizer(std::move(checkpoint), importance);
    return QuantizeCheckpointOn(io, source, output, options, &quantizer);
  } catch (const ThreadStartError& error) {
    return Status(Code::kOutOfMemory, Printable(source) + ": " + error.what());
  }
}

}  // namespace marlin
