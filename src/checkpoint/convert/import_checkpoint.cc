// Importing: the codes of another program's checkpoint as a directory of this one.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/seconds_since.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/model_card.h"
#include "checkpoint/convert/unit_converter.h"
#include "checkpoint/decoder_names.h"
#include "checkpoint/module_tensors.h"
#include "layout/slice_expert.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

/// How a module that no format of codes holds is quantized, if it may be. Scales of fp32 fit
/// whatever the other program computed.
QuantizeOptions RoundingOf(const ModuleRecord& record) {
  return {.format = Format::kS8,
          .group_size = 32,
          .scale_type = ScaleType::kF32,
          .symmetric = true,
          .tensor_name = record.module.name};
}

std::string_view ExactnessText(Exactness exactness) {
  switch (exactness) {
    case Exactness::kExact:
      return "exact";
    case Exactness::kLastBit:
      return "exact to the last bit of fp32";
    case Exactness::kRounded:
      break;
  }
  return "re-rounded";
}

bool HasCodes(const ModuleRecord& record) {
  return GetFormatInfo(record.module.spec.format).quantized;
}

class CheckpointImporter final : public UnitConverter {
 public:
  CheckpointImporter(const Checkpoint& checkpoint, const ImportCheckpointOptions& options)
      : UnitConverter(checkpoint, options.progress), options_(options) {}

  /// Plans the units and completes the report, except the errors of re-rounding.
  Status Prepare();
  const ImportCheckpointReport& report() const { return report_; }
  std::string ConfigText() const;

 private:
  Status PlanModule(const ModuleRecord& record) override;
  void PlanCopy(const TensorInfo& tensor) override;
  Result<QuantizedWeights> LoadModule(const ModuleRecord& record) override;
  Status WriteModule(TensorWriter* writer, size_t unit, const QuantizedWeights& weights) override;
  Status WriteExpert(TensorWriter* writer, size_t unit, const QuantizedWeights& expert,
                     int64_t number) override;

  Result<const ModuleRecord*> Round(const ModuleRecord& record);
  Result<QuantizedWeights> LoadRounded(const ModuleRecord& record, ImportedModule* module) const;

  const ImportCheckpointOptions& options_;
  std::deque<ModuleRecord> rounded_;  ///< Descriptions of modules that are quantized again.
  std::unordered_map<const ModuleRecord*, size_t> reported_;  ///< Their numbers in the report.
  std::vector<const ModuleRecord*> modules_;  ///< As they are written, in the order of the report.
  ImportCheckpointReport report_;
};

Status CheckpointImporter::PlanModule(const ModuleRecord& record) {
  int64_t before = 0;
  for (const PartTensor& part : source_.reader->Parts(record)) {
    before += source_.tensors[part.tensor].bytes;
  }
  const ModuleRecord* written = &record;
  if (!HasCodes(record) && options_.allow_requantize) {
    MARLIN_ASSIGN_OR_RETURN(written, Round(record));
    reported_[written] = report_.modules.size();
  }
  const WeightsSpec& spec = written->module.spec;
  int64_t after = 0;  // Without the codebook, which is a few bytes for a whole module.
  if (HasCodes(*written)) {
    OutputUnit outputs;
    for (ModuleTensor& part : ModuleTensors(*written)) {
      if (part.part != ModulePart::kCodebook) after += part.bytes;
      outputs.push_back({std::move(part.name), part.dtype, part.shape});
    }
    AddUnit(*written, 0, spec.experts, std::move(outputs));
    report_.quantized_parameters += units().back().parameters;
  } else {
    const DType dtype = UnquantizedDType(spec.format);
    AddDense(record, dtype);
    after = spec.experts * spec.k * spec.n * DTypeBytes(dtype);
    report_.skipped.push_back(
        {record.module.name, fmt::format("no format of codes holds it: {}", DTypeName(dtype))});
  }
  modules_.push_back(written);
  report_.modules.push_back(
      {record.module.name, spec, std::string(ExactnessText(written->exactness)),
       before == 0 ? 1.0 : static_cast<double>(after) / static_cast<double>(before)});
  report_.source_bytes += before;
  return {};
}

/// Describes a module that no format of codes holds as it will be quantized again.
Result<const ModuleRecord*> CheckpointImporter::Round(const ModuleRecord& record) {
  const WeightsSpec& spec = record.module.spec;
  MARLIN_ASSIGN_OR_RETURN(
      const WeightsSpec rounded,
      QuantizedSpec(record.stacked ? Shape{spec.experts, spec.k, spec.n} : Shape{spec.k, spec.n},
                    RoundingOf(record)));
  rounded_.push_back(record);
  rounded_.back().module.spec = rounded;
  rounded_.back().exactness = Exactness::kRounded;
  return &rounded_.back();
}

void CheckpointImporter::PlanCopy(const TensorInfo& tensor) {
  if (tensor.shape.rank() >= 2 && tensor.bytes > 0) {
    report_.skipped.push_back(
        {tensor.name, fmt::format("the source stores it in {}", DTypeName(tensor.dtype))});
  }
  report_.source_bytes += tensor.bytes;
}

Status CheckpointImporter::Prepare() {
  MARLIN_RETURN_IF_ERROR(Plan());
  for (const SourceUnit& unit : units()) {
    for (const OutputTensor& tensor : unit.outputs) report_.bytes += tensor.bytes;
  }
  for (const ContainedFile& file : source_.reader->Files()) {
    if (!file.obstacle.empty()) report_.files.push_back({file.name, file.obstacle});
  }
  report_.method = source_.quant_method;
  report_.tensors = static_cast<int64_t>(units().size());
  report_.parameters = parameters();
  if (report_.parameters > 0) {
    const auto all = static_cast<double>(report_.parameters);
    report_.bits_per_weight = 8.0 * static_cast<double>(report_.bytes) / all;
    report_.coverage = static_cast<double>(report_.quantized_parameters) / all;
  }
  return {};
}

Result<QuantizedWeights> CheckpointImporter::LoadModule(const ModuleRecord& record) {
  const auto reported = reported_.find(&record);
  return reported == reported_.end() ? checkpoint_.Weights(record.module.name)
                                     : LoadRounded(record, &report_.modules[reported->second]);
}

Status CheckpointImporter::WriteModule(TensorWriter* writer, size_t unit,
                                       const QuantizedWeights& weights) {
  const ModuleRecord& record = *units()[unit].record;
  if (!HasCodes(record)) return UnitConverter::WriteModule(writer, unit, weights);
  if (!(weights.spec == record.module.spec)) {
    return Status(Code::kInternal, "loaded weights differ from the plan");
  }
  const std::vector<ModuleTensor> tensors = ModuleTensors(record);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (const TensorView* const view = PartView(weights, tensors[i].part)) {
      MARLIN_RETURN_IF_ERROR(writer->Append(unit, i, view->data(), view->ByteCount()));
      continue;
    }
    const std::span<const float> values = weights.codebook.empty()
                                              ? FormatValues(weights.spec.format)
                                              : std::span<const float>(weights.codebook);
    MARLIN_RETURN_IF_ERROR(
        writer->Append(unit, i, values.data(), static_cast<int64_t>(values.size_bytes())));
  }
  Advance(units()[unit].parameters);
  return {};
}

Status CheckpointImporter::WriteExpert(TensorWriter* writer, size_t unit,
                                       const QuantizedWeights& expert, int64_t /*number*/) {
  const DType dtype = UnquantizedDType(expert.spec.format);
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer dense,
                          MakeDense(*units()[unit].record, expert, dtype));
  return writer->Append(unit, 0, dense.data(), expert.spec.k * expert.spec.n * DTypeBytes(dtype));
}

/// Quantizes a module that no format holds, and measures the error.
Result<QuantizedWeights> CheckpointImporter::LoadRounded(const ModuleRecord& record,
                                                         ImportedModule* module) const {
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights exact, checkpoint_.Weights(record.module.name));
  const WeightsSpec& spec = exact.spec;
  const Shape shape = record.stacked ? Shape{spec.experts, spec.k, spec.n} : Shape{spec.k, spec.n};
  MARLIN_ASSIGN_OR_RETURN(
      QuantizedWeights rounded,
      Quantize(TensorView(exact.codes.data(), exact.codes.dtype(), shape), RoundingOf(record)));
  const int64_t count = spec.k * spec.n;
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer buffer,
                          AlignedBuffer::Allocate(count * DTypeBytes(DType::kF32)));
  const auto* const values = buffer.As<float>();
  double squares = 0;
  double errors = 0;
  for (int64_t e = 0; e < spec.experts; ++e) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights slice, SliceExpert(rounded, e));
    MARLIN_RETURN_IF_ERROR(
        Dequantize(slice, MutableTensorView(buffer.data(), DType::kF32, {spec.k, spec.n})));
    for (int64_t i = 0; i < count; ++i) {
      const double value = exact.codes.As<float>()[e * count + i];
      const double error = std::abs(static_cast<double>(values[i]) - value);
      module->max_error = std::max(module->max_error, error);
      squares += value * value;
      errors += error * error;
    }
  }
  if (squares > 0) module->relative_error = std::sqrt(errors / squares);
  return rounded;
}

// The source's config.json with the description of the modules in place of the source's own.
std::string CheckpointImporter::ConfigText() const {
  Json config = source_.config().is_object() ? source_.config() : Json::object();
  RemoveQuantization(&config);
  QuantizationConfig quantization;
  quantization.recipe_name = "imported";
  quantization.method = source_.quant_method;
  for (const ModuleRecord* const record : modules_) {
    if (!HasCodes(*record)) continue;
    quantization.modules.push_back(*record);
    QuantizedModule& module = quantization.modules.back().module;
    module.name = StoredName(source_, module.name);
  }
  if (!quantization.modules.empty()) {
    config["quantization_config"] = BuildQuantizationConfig(quantization, Json::object());
  }
  return config.empty() ? std::string() : DumpJson(config, 2) + "\n";
}

ModelCard CardOf(const ImportCheckpointReport& report, const std::string& output) {
  ModelCard card;
  card.output = output;
  card.target = card.library = "metal-marlin";
  card.method = report.method.empty() ? "none" : fmt::format("codes of {}, kept", report.method);
  card.parameters = report.parameters;
  card.quantized_parameters = report.quantized_parameters;
  card.bytes = report.bytes;
  for (const ImportedModule& module : report.modules) {
    card.modules.push_back({module.spec, module.exactness});
    if (module.relative_error == 0) continue;
    card.metrics.push_back(fmt::format(
        "{}: error of the re-rounded weights {:.3g} % of their root mean square, at most {:.3g}",
        module.name, 100 * module.relative_error, module.max_error));
  }
  card.skipped = report.skipped;
  return card;
}

Status CheckImportable(const Checkpoint::Impl& source, const ImportCheckpointOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckShardBytes(options.shard_bytes));
  if (source.quantized()) {
    return Status(Code::kInvalidArgument,
                  Printable(source.path) + ": is a directory of metal-marlin already");
  }
  if (source.quant_method.empty() && !source.other_form()) {
    return Status(Code::kInvalidArgument,
                  Printable(source.path) + ": is not quantized: there is nothing to import");
  }
  return {};
}

Result<ImportCheckpointReport> ImportImpl(Io& io, const std::string& source_path,
                                          const std::string& output,
                                          const ImportCheckpointOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          CheckpointAccess::Open(io, source_path, {options.allow_extra_tensors}));
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  MARLIN_RETURN_IF_ERROR(CheckImportable(source, options));
  CheckpointImporter importer(checkpoint, options);
  MARLIN_RETURN_IF_ERROR(importer.Prepare());
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = options.overwrite;
  importer.Attach(&conversion);
  conversion.shard_bytes = options.shard_bytes;
  conversion.config_json = importer.ConfigText();
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  if (!options.dry_run) {
    conversion.fingerprint = Fingerprint(
        source, fmt::format("import {} {}", options.shard_bytes, options.allow_requantize));
    if (options.model_card) {
      conversion.model_card = [&] {
        return ModelCardText(io, source, CardOf(importer.report(), output));
      };
    }
    MARLIN_RETURN_IF_ERROR(RunConversion(io, source, conversion).status());
  }
  ImportCheckpointReport report = importer.report();
  report.output = output;
  report.notes = source.notes;
  report.seconds = SecondsSince(start);
  return report;
}

}  // namespace

Result<ImportCheckpointReport> ImportCheckpointOn(Io& io, const std::string& source,
                                                  const std::string& output,
                                                  const ImportCheckpointOptions& options) {
  return WithoutExceptions(source, "import",
                           [&] { return ImportImpl(io, source, output, options); });
}

Result<ImportCheckpointReport> ImportCheckpoint(const std::string& source,
                                                const std::string& output,
                                                const ImportCheckpointOptions& options) {
  SystemIo io;
  return ImportCheckpointOn(io, source, output, options);
}

}  // namespace marlin
