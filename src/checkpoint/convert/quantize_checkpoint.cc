#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/function_ref.h"
#include "base/macros.h"
#include "base/seconds_since.h"
#include "checkpoint/codes/tiled_codes.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/matrix_quantizer.h"
#include "checkpoint/convert/model_card.h"
#include "checkpoint/convert/quantize_plan.h"
#include "checkpoint/convert/unit_converter.h"
#include "checkpoint/decoder_names.h"
#include "checkpoint/files/checksum.h"
#include "marlin/checkpoint.h"
#include "marlin/layout.h"
#include "quantize/quantizer.h"
#include "recipe/decoder_shape.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

/// The record of a stack that the method calibrated in part.
std::string PartlyCalibrated(QuantizeMethod method) {
  return fmt::format("{}, {}", QuantizeMethodName(method),
                     QuantizeMethodName(QuantizeMethod::kMse));
}

bool RotatesInputs(const PlanUnit& unit) {
  return unit.action == PlanUnit::Action::kQuantize && unit.record.module.spec.input_hadamard > 0;
}

/// The error for a method with data of which no matrix of the plan has any; ok if there are none.
Status NothingCalibrated(const Checkpoint::Impl& source, const QuantizePlan& plan,
                         const QuantizeCheckpointOptions& options,
                         const MatrixQuantizer& quantizer) {
  if (plan.quantized_parameters == 0 || quantizer.fallbacks().empty()) return {};
  const SkippedTensor& first = quantizer.fallbacks().front();
  return Status(
      Code::kUnsupported,
      fmt::format("{}: method {}: there are no data for any of the matrices that the recipe "
                  "quantizes: \"{}\": {}",
                  Printable(source.path), QuantizeMethodName(options.method), Printable(first.name),
                  first.reason));
}

/// Elements of the matrices of a plan that a quantizer calibrates, as far as it knows.
int64_t Calibratable(const Checkpoint::Impl& source, const QuantizePlan& plan,
                     const MatrixQuantizer& quantizer) {
  int64_t parameters = 0;
  for (const PlanUnit& unit : plan.units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    for (const size_t tensor : unit.sources) {
      const Shape& shape = source.tensors[tensor].shape;
      const int64_t expert = shape.rank() == 3 ? 0 : -1;
      if (quantizer.Calibrates(tensor, expert)) parameters += shape.ElementCount();
    }
  }
  return parameters;
}

/// The matrices of a unit as they were written, beyond its plan.
struct Outcome {
  bool not_rotated = false;  ///< Without the plan's Hadamard blocks.
  bool calibrated = false;   ///< Data decided some matrices, and others not.
  bool uncalibrated = false;

  /// As a character, which is stored with the unit.
  char mark() const {
    return static_cast<char>('0' + (not_rotated ? 1 : 0) + (calibrated ? 2 : 0) +
                             (uncalibrated ? 4 : 0));
  }
  static Outcome FromMark(char mark) {
    const int bits = mark - '0';
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
  }
};

// Quantizes the units of a plan, one source matrix at a time.
class UnitQuantizer {
 public:
  UnitQuantizer(ThreadPool& pool, Checkpoint* checkpoint, const QuantizePlan& plan,
                const QuantizeCheckpointOptions& options, MatrixQuantizer* quantizer)
      : pool_(pool),
        checkpoint_(checkpoint),
        source_(CheckpointAccess::Get(*checkpoint)),
        plan_(plan),
        options_(options),
        quantizer_(quantizer),
        outcomes_(plan.units.size()) {}

  Result<int64_t> Write(TensorWriter* writer, size_t unit);
  /// For a unit that an interrupted run wrote, with its mark.
  void Skip(size_t unit, char mark);
  char mark(size_t unit) const { return outcomes_[unit].mark(); }
  /// A module as it was written.
  ModuleRecord Written(size_t unit) const;
  /// Modules with Hadamard blocks.
  int64_t rotated() const;
  /// Elements of the matrices that were calibrated; of stacks that an interrupted run wrote, only
  /// stacks of which all experts were.
  int64_t calibrated_parameters() const { return calibrated_parameters_; }
  /// Errors: kUnsupported if the method needs data, and no matrix had any.
  Status CheckCalibrated() const;

 private:
  /// A source tensor, and the expert in a tensor that stacks them, or -1.
  struct SourceMatrix {
    size_t tensor;
    int64_t expert;
  };
  Status Transform();
  Status WriteCast(TensorWriter* writer, size_t unit);
  int64_t ParametersOf(size_t unit) const;
  Result<int64_t> WriteTensor(TensorWriter* writer, size_t unit, size_t tensor);
  Result<int64_t> WriteMatrix(TensorWriter* writer, size_t unit, const SourceMatrix& source,
                              const TensorView& matrix, bool last);
  Result<MatrixQuantizer::Result> QuantizeMatrix(size_t unit, const SourceMatrix& source,
                                                 const TensorView& matrix);
  Status InFile(size_t tensor, const Status& status) const;
  void Advance(int64_t parameters);

  ThreadPool& pool_;
  Checkpoint* checkpoint_;
  const Checkpoint::Impl& source_;
  const QuantizePlan& plan_;
  const QuantizeCheckpointOptions& options_;
  MatrixQuantizer* quantizer_;
  std::vector<Outcome> outcomes_;  ///< By unit.
  bool transformed_ = false;
  int64_t done_ = 0;
  int64_t calibrated_parameters_ = 0;
};

void UnitQuantizer::Advance(int64_t parameters) {
  done_ += parameters;
  if (options_.progress) options_.progress(done_, plan_.parameters);
}

void UnitQuantizer::Skip(size_t unit, char mark) {
  const Outcome& outcome = outcomes_[unit] = Outcome::FromMark(mark);
  if (outcome.calibrated && !outcome.uncalibrated) calibrated_parameters_ += ParametersOf(unit);
  Advance(ParametersOf(unit));
}

ModuleRecord UnitQuantizer::Written(size_t unit) const {
  ModuleRecord record = plan_.units[unit].record;
  const Outcome& outcome = outcomes_[unit];
  if (outcome.not_rotated) record.module.spec.input_hadamard = 0;
  if (outcome.uncalibrated && NeedsCalibration(options_.method)) {
    record.method = outcome.calibrated ? PartlyCalibrated(options_.method)
                                       : std::string(QuantizeMethodName(QuantizeMethod::kMse));
  }
  return record;
}

int64_t UnitQuantizer::rotated() const {
  int64_t count = 0;
  for (size_t unit = 0; unit < outcomes_.size(); ++unit) {
    count += RotatesInputs(plan_.units[unit]) && !outcomes_[unit].not_rotated ? 1 : 0;
  }
  return count;
}

Status UnitQuantizer::CheckCalibrated() const {
  const auto calibrated = [](const Outcome& outcome) { return outcome.calibrated; };
  if (std::any_of(outcomes_.begin(), outcomes_.end(), calibrated)) return {};
  return NothingCalibrated(source_, plan_, options_, *quantizer_);
}

int64_t UnitQuantizer::ParametersOf(size_t unit) const {
  int64_t parameters = 0;
  for (const size_t tensor : plan_.units[unit].sources) {
    parameters += source_.tensors[tensor].shape.ElementCount();
  }
  return parameters;
}

// Quantize names the tensor in its error; this adds the file.
Status UnitQuantizer::InFile(size_t tensor, const Status& status) const {
  return status.WithContext(source_.is_directory
                                ? Printable(JoinPath(source_.path, source_.tensors[tensor].file))
                                : Printable(source_.path));
}

Result<MatrixQuantizer::Result> UnitQuantizer::QuantizeMatrix(size_t unit,
                                                              const SourceMatrix& source,
                                                              const TensorView& matrix) {
  if (quantizer_ != nullptr) {
    MARLIN_ASSIGN_OR_RETURN(std::optional<MatrixQuantizer::Result> made,
                            quantizer_->Quantize(source.tensor, source.expert));
    if (made) return *std::move(made);
  }
  const PlanUnit& plan = plan_.units[unit];
  const QuantizeOptions options =
      OptionsFor(plan.choice, options_.method, source_.tensors[source.tensor].name);
  const bool transposed = plan.record.layout == SourceLayout::kOutIn;
  QuantizeReport report;
  MatrixQuantizer::Result result;
  MARLIN_ASSIGN_OR_RETURN(
      result.weights,
      QuantizeOn(pool_, transposed ? matrix.Transposed() : matrix, options, &report));
  result.zeroed_groups = report.zeroed_groups;
  return result;
}

Result<int64_t> UnitQuantizer::WriteMatrix(TensorWriter* writer, size_t unit,
                                           const SourceMatrix& source, const TensorView& matrix,
                                           bool last) {
  const PlanUnit& plan = plan_.units[unit];
  MARLIN_ASSIGN_OR_RETURN(const MatrixQuantizer::Result made, QuantizeMatrix(unit, source, matrix));
  const QuantizedWeights& weights = made.weights;
  WeightsSpec expected = plan.record.module.spec;
  expected.experts = 1;
  if (expected.input_hadamard > 0 && weights.spec.input_hadamard == 0) {
    outcomes_[unit].not_rotated = true;
    expected.input_hadamard = 0;
  }
  if (!(weights.spec == expected)) {
    return Status(Code::kInternal, "quantized weights differ from the plan");
  }
  size_t part = 0;
  for (const ModuleTensor& stored : ModuleTensors(plan.record)) {
    const size_t index = part++;
    if (stored.part == ModulePart::kCodebook) {
      if (!last) continue;  // All experts share one codebook.
      const std::span<const float> values = FormatValues(weights.spec.format);
      MARLIN_RETURN_IF_ERROR(
          writer->Append(unit, index, values.data(), static_cast<int64_t>(values.size_bytes())));
      continue;
    }
    if (stored.part == ModulePart::kCodes && plan.record.codes == PackedLayout::kMarlinW4) {
      MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer tiles, TileCodes(weights));
      MARLIN_RETURN_IF_ERROR(
          writer->Append(unit, index, tiles.data(), MarlinW4WordCount(expected.k, expected.n) * 4));
      continue;
    }
    const TensorView& view = *PartView(weights, stored.part);
    MARLIN_RETURN_IF_ERROR(writer->Append(unit, index, view.data(), view.ByteCount()));
  }
  if (quantizer_ != nullptr) {
    const bool calibrated = quantizer_->Calibrates(source.tensor, source.expert);
    (calibrated ? outcomes_[unit].calibrated : outcomes_[unit].uncalibrated) = true;
    if (calibrated) calibrated_parameters_ += matrix.ElementCount();
  }
  Advance(matrix.ElementCount());
  return made.zeroed_groups;
}

Result<int64_t> UnitQuantizer::WriteTensor(TensorWriter* writer, size_t unit, size_t tensor) {
  MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded, LoadedTensor::Load(source_, tensor));
  const TensorView& view = loaded.view();
  const bool last_tensor = tensor == plan_.units[unit].sources.back();
  if (view.rank() == 2) return WriteMatrix(writer, unit, {tensor, -1}, view, last_tensor);
  int64_t zeroed = 0;
  for (int64_t e = 0; e < view.dim(0); ++e) {
    Result<int64_t> groups =
        WriteMatrix(writer, unit, {tensor, e}, MatrixOf(view, e), e + 1 == view.dim(0));
    if (!groups.ok()) return groups.status().WithContext(fmt::format("expert {}", e));
    zeroed += *groups;
  }
  return zeroed;
}

Status UnitQuantizer::WriteCast(TensorWriter* writer, size_t unit) {
  const PlanUnit& plan = plan_.units[unit];
  const size_t tensor = plan.sources.front();
  MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded, LoadedTensor::Load(source_, tensor));
  // Element-wise, so the roles of the dimensions do not matter.
  const QuantizeOptions options =
      OptionsFor(plan.choice, options_.method, source_.tensors[tensor].name);
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights,
                          QuantizeOn(pool_, loaded.view(), options, nullptr));
  MARLIN_RETURN_IF_ERROR(writer->Append(unit, 0, weights.codes.data(), weights.codes.ByteCount()));
  Advance(loaded.view().ElementCount());
  return {};
}

Status UnitQuantizer::Transform() {
  if (quantizer_ == nullptr || std::exchange(transformed_, true)) return {};
  return quantizer_->Transform(checkpoint_);
}

Result<int64_t> UnitQuantizer::Write(TensorWriter* writer, size_t unit) {
  MARLIN_RETURN_IF_ERROR(Transform());
  const PlanUnit& plan = plan_.units[unit];
  if (plan.action == PlanUnit::Action::kCopy) {
    MARLIN_RETURN_IF_ERROR(CopyTensor(source_, plan.sources.front(), unit, writer));
    Advance(ParametersOf(unit));
    return 0;
  }
  if (plan.action == PlanUnit::Action::kCast) {
    const Status status = WriteCast(writer, unit);
    if (status.code() == Code::kIo) return status;
    MARLIN_RETURN_IF_ERROR(InFile(plan.sources.front(), status));
    return 0;
  }
  int64_t zeroed = 0;
  for (const size_t tensor : plan.sources) {
    const Result<int64_t> groups = WriteTensor(writer, unit, tensor);
    if (!groups.ok()) {
      // A write error names its own file.
      const Status& status = groups.status();
      return status.code() == Code::kIo ? status : InFile(tensor, status);
    }
    zeroed += *groups;
  }
  return zeroed;
}

// The source's config.json plus the description of the quantized modules; `record` describes a
// unit's module.
std::string ConfigText(const Checkpoint::Impl& source, const QuantizePlan& plan,
                       const QuantizeCheckpointOptions& options, const Json& recipe,
                       FunctionRef<ModuleRecord(size_t unit)> record) {
  QuantizationConfig quantization;
  quantization.recipe_name = options.recipe.name();
  quantization.method = QuantizeMethodName(options.method);
  for (size_t i = 0; i < plan.units.size(); ++i) {
    if (plan.units[i].action != PlanUnit::Action::kQuantize) continue;
    quantization.modules.push_back(record(i));
    QuantizedModule& module = quantization.modules.back().module;
    module.name = StoredName(source, module.name);
  }
  Json config = source.config().is_object() ? source.config() : Json::object();
  RemoveQuantization(&config);
  config["quantization_config"] = BuildQuantizationConfig(quantization, recipe);
  return DumpJson(config, 2) + "\n";
}

/// The longest config.json that may be written.
std::string PlannedConfig(const Checkpoint::Impl& source, const QuantizePlan& plan,
                          const QuantizeCheckpointOptions& options, const Json& recipe) {
  return ConfigText(source, plan, options, recipe, [&](size_t unit) {
    ModuleRecord record = plan.units[unit].record;
    if (NeedsCalibration(options.method)) record.method = PartlyCalibrated(options.method);
    return record;
  });
}

Status CheckQuantizable(const Checkpoint::Impl& source, const QuantizeCheckpointOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckShardBytes(options.shard_bytes));
  if (source.quant_method.empty()) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("{}: is quantized already, with {}; dequantize it first",
                            Printable(source.path), Printable(source.quant_method)));
}

/// The model_type, if it is given and the decoder cannot run it.
std::string UnsupportedType(const Json& config) {
  const std::string name = TextModelType(config);
  if (name.empty()) return {};
  const Result<const Family*> family = FindFamily(name);
  return family.ok() ? std::string() : name;
}

/// The format in which a unit of one matrix is written.
ModelEnds::Matrix WrittenAs(const PlanUnit& unit, int64_t elements) {
  int64_t bytes = 0;
  for (const OutputTensor& tensor : unit.outputs) bytes += tensor.bytes;
  const bool codes = unit.action == PlanUnit::Action::kQuantize;
  return {codes ? unit.choice.ToString() : std::string(DTypeName(unit.outputs.front().dtype)),
          8.0 * static_cast<double>(bytes) / static_cast<double>(elements)};
}

/// The embedding and the head: not a layer's own, nor a table for all layers.
ModelEnds EndsOf(const Checkpoint::Impl& source, const QuantizePlan& plan) {
  ModelEnds ends;
  for (const PlanUnit& unit : plan.units) {
    const TensorInfo& tensor = source.tensors[unit.sources.front()];
    const LayerClass layer_class = ClassifyTensor(tensor.name);
    if (!IsModelEnd(layer_class) || !IsWeightMatrix(tensor.name, tensor.shape) ||
        tensor.name.find("layers.") != std::string::npos ||
        tensor.name.find("_per_layer.") != std::string::npos) {
      continue;
    }
    ModelEnds::Matrix& matrix = layer_class == LayerClass::kEmbedding ? ends.embedding : ends.head;
    if (matrix.format.empty()) matrix = WrittenAs(unit, tensor.shape.ElementCount());
  }
  ends.tied = ends.head.format.empty() && !ends.embedding.format.empty();
  if (ends.tied) ends.head = ends.embedding;
  return ends;
}

QuantizeCheckpointReport ReportOf(const Checkpoint::Impl& source, const QuantizePlan& plan,
                                  const std::string& output) {
  QuantizeCheckpointReport report;
  report.output = output;
  report.tensors = static_cast<int64_t>(source.tensors.size());
  report.parameters = plan.parameters;
  report.quantized_parameters = plan.quantized_parameters;
  report.bytes = plan.bytes;
  report.ends = EndsOf(source, plan);
  report.skipped = plan.skipped;
  report.unsupported_type = UnsupportedType(source.config());
  report.rotatable = std::count_if(plan.units.begin(), plan.units.end(), RotatesInputs);
  if (plan.parameters > 0) {
    const auto parameters = static_cast<double>(plan.parameters);
    report.bits_per_weight = 8.0 * static_cast<double>(plan.bytes) / parameters;
    if (plan.quantized_parameters > 0) {
      report.quantized_bits_per_weight = 8.0 * static_cast<double>(plan.quantized_bytes) /
                                         static_cast<double>(plan.quantized_parameters);
    }
    report.coverage = static_cast<double>(plan.quantized_parameters) / parameters;
  }
  return report;
}

ModelCard CardOf(const QuantizePlan& plan, const QuantizeCheckpointOptions& options,
                 const QuantizeCheckpointReport& report, const UnitQuantizer& written) {
  ModelCard card;
  card.output = report.output;
  card.target = card.library = "metal-marlin";
  card.method = QuantizeMethodName(options.method);
  card.recipe = options.recipe.name();
  card.parameters = report.parameters;
  card.quantized_parameters = report.quantized_parameters;
  card.bytes = report.bytes;
  for (size_t unit = 0; unit < plan.units.size(); ++unit) {
    if (plan.units[unit].action != PlanUnit::Action::kQuantize) continue;
    const ModuleRecord record = written.Written(unit);
    card.modules.push_back({record.module.spec, "rounded"});
    if (!record.method.empty()) card.other_methods.push_back({record.module.name, record.method});
  }
  card.skipped = report.skipped;
  return card;
}

/// Writes the output, and completes the report.
Status WriteOutput(Io& io, Checkpoint* checkpoint, const QuantizePlan& plan, const Json& recipe,
                   const QuantizeCheckpointOptions& options, MatrixQuantizer* quantizer,
                   Conversion* conversion, QuantizeCheckpointReport* report) {
  const Checkpoint::Impl& source = CheckpointAccess::Get(*checkpoint);
  ThreadPool pool(0);
  UnitQuantizer units(pool, checkpoint, plan, options, quantizer);
  conversion->fingerprint =
      Fingerprint(source, fmt::format("quantize {} {} {:016x}", options.shard_bytes,
                                      quantizer == nullptr ? "" : quantizer->Identity(),
                                      ChecksumOf(conversion->config_json)));
  conversion->write_unit = [&](TensorWriter* writer, size_t unit) {
    return units.Write(writer, unit);
  };
  conversion->skip_unit = [&](size_t unit, char mark) { units.Skip(unit, mark); };
  if (quantizer != nullptr) {
    conversion->mark = [&](size_t unit) { return units.mark(unit); };
    conversion->written_config = [&]() -> Result<std::string> {
      MARLIN_RETURN_IF_ERROR(units.CheckCalibrated());
      return ConfigText(source, plan, options, recipe,
                        [&](size_t unit) { return units.Written(unit); });
    };
  }
  if (options.model_card) {
    conversion->model_card = [&] {
      return ModelCardText(io, source, CardOf(plan, options, *report, units));
    };
  }
  MARLIN_ASSIGN_OR_RETURN(report->zeroed_groups, RunConversion(io, source, *conversion));
  report->rotated = units.rotated();
  report->calibrated_parameters = units.calibrated_parameters();
  return {};
}

Result<QuantizeCheckpointReport> QuantizeImpl(Io& io, const std::string& source_path,
                                              const std::string& output,
                                              const QuantizeCheckpointOptions& options,
                                              MatrixQuantizer* quantizer) {
  const auto start = std::chrono::steady_clock::now();
  MARLIN_ASSIGN_OR_RETURN(Checkpoint checkpoint,
                          CheckpointAccess::Open(io, source_path, {options.allow_extra_tensors}));
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  MARLIN_RETURN_IF_ERROR(CheckQuantizable(source, options));
  MARLIN_ASSIGN_OR_RETURN(QuantizePlan plan, PlanQuantize(source, options));
  int64_t calibratable = 0;
  if (quantizer != nullptr) {
    MARLIN_RETURN_IF_ERROR(quantizer->Begin(&plan));
    calibratable = Calibratable(source, plan, *quantizer);
    if (calibratable == 0) {
      MARLIN_RETURN_IF_ERROR(NothingCalibrated(source, plan, options, *quantizer));
    }
  }
  MARLIN_ASSIGN_OR_RETURN(const Json recipe, ParseJsonObject(options.recipe.ToJson(), "recipe"));
  QuantizeCheckpointReport report = ReportOf(source, plan, output);
  report.notes = source.notes;
  report.calibrated_parameters = calibratable;
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = options.overwrite;
  conversion.options.resume = options.resume;
  for (PlanUnit& unit : plan.units) conversion.units.push_back(std::move(unit.outputs));
  conversion.shard_bytes = options.shard_bytes;
  conversion.config_json = PlannedConfig(source, plan, options, recipe);
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  if (!options.dry_run) {
    MARLIN_RETURN_IF_ERROR(
        WriteOutput(io, &checkpoint, plan, recipe, options, quantizer, &conversion, &report));
  }
  if (quantizer != nullptr) {
    report.fallbacks = quantizer->fallbacks();
    report.unselected_experts = quantizer->unselected_experts();
    report.inputs = quantizer->inputs();
    report.scaled_inputs = quantizer->scaled_inputs();
  }
  report.seconds = SecondsSince(start);
  return report;
}

}  // namespace

Result<QuantizeCheckpointReport> QuantizeCheckpointOn(Io& io, const std::string& source,
                                                      const std::string& output,
                                                      const QuantizeCheckpointOptions& options,
                                                      MatrixQuantizer* quantizer) {
  return WithoutExceptions(source, "quantize",
                           [&] { return QuantizeImpl(io, source, output, options, quantizer); });
}

Result<QuantizeCheckpointReport> QuantizeCheckpoint(const std::string& source,
                                                    const std::string& output,
                                                    const QuantizeCheckpointOptions& options) {
  if (NeedsCalibration(options.method)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("method {}: needs a text; see QuantizeCalibrated",
                              QuantizeMethodName(options.method)));
  }
  SystemIo io;
  return QuantizeCheckpointOn(io, source, output, options);
}

}  // namespace marlin
