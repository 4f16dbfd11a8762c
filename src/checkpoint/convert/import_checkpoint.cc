// Importing: the codes of another program's checkpoint as a directory of this one.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/seconds_since.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/model_card.h"
#include "checkpoint/module_tensors.h"
#include "layout/slice_expert.h"
#include "marlin/checkpoint.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

/// One unit of output: the tensors of a module, or a tensor to copy. A module that no format holds
/// has one unit for each matrix.
struct ImportUnit {
  const ModuleRecord* record = nullptr;  ///< Null for a copy.
  /// The number of the module in the report if it is quantized again.
  std::optional<size_t> rounded;
  int64_t expert = 0;  ///< Matrix of a module that no format holds.
  size_t tensor = 0;   ///< The copied tensor, or the module's first.
  OutputUnit outputs;
  int64_t parameters = 0;
};

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

class CheckpointImporter {
 public:
  CheckpointImporter(const Checkpoint& checkpoint, const ImportCheckpointOptions& options)
      : checkpoint_(checkpoint), source_(CheckpointAccess::Get(checkpoint)), options_(options) {}

  Status Plan();
  Status Write(TensorWriter* writer, size_t unit);

  const std::vector<ImportUnit>& units() const { return units_; }
  const ImportCheckpointReport& report() const { return report_; }
  std::string ConfigText() const;

 private:
  Status PlanModule(const ModuleRecord& record);
  Result<const ModuleRecord*> Round(const ModuleRecord& record);
  int64_t PlanCodes(const ModuleRecord& record, size_t tensor);
  int64_t PlanFloats(const ModuleRecord& record, size_t tensor);
  void PlanCopy(size_t tensor);
  Status WriteModule(TensorWriter* writer, size_t unit, const ModuleRecord& record);
  Result<QuantizedWeights> LoadRounded(const ModuleRecord& record, ImportedModule* module) const;
  Status WriteFloats(TensorWriter* writer, size_t unit);

  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;
  const ImportCheckpointOptions& options_;
  std::vector<ImportUnit> units_;
  std::deque<ModuleRecord> rounded_;          ///< Descriptions of modules that are quantized again.
  std::vector<const ModuleRecord*> modules_;  ///< As they are written, in the order of the report.
  ImportCheckpointReport report_;
  int64_t done_ = 0;
  const ModuleRecord* loaded_ = nullptr;  ///< The module of floats whose weights are in weights_.
  QuantizedWeights weights_;
};

Status CheckpointImporter::PlanModule(const ModuleRecord& record) {
  int64_t before = 0;
  const std::vector<PartTensor> parts = source_.reader->Parts(record);
  const size_t first = parts.front().tensor;
  for (const PartTensor& part : parts) before += source_.tensors[part.tensor].bytes;
  const ModuleRecord* written = &record;
  const bool codes = GetFormatInfo(record.module.spec.format).quantized;
  if (!codes && options_.allow_requantize) {
    MARLIN_ASSIGN_OR_RETURN(written, Round(record));
  }
  const bool rounded = written != &record;
  const int64_t after = codes || rounded ? PlanCodes(*written, first) : PlanFloats(record, first);
  if (rounded) units_.back().rounded = report_.modules.size();
  modules_.push_back(written);
  report_.modules.push_back(
      {record.module.name, written->module.spec, std::string(ExactnessText(written->exactness)),
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

/// Plans the tensors of a quantized module; returns their size without the codebook, which is a
/// few bytes for a whole module.
int64_t CheckpointImporter::PlanCodes(const ModuleRecord& record, size_t tensor) {
  const WeightsSpec& spec = record.module.spec;
  ImportUnit unit;
  unit.record = &record;
  unit.tensor = tensor;
  unit.parameters = spec.experts * spec.k * spec.n;
  int64_t bytes = 0;
  for (ModuleTensor& part : ModuleTensors(record)) {
    if (part.part != ModulePart::kCodebook) bytes += part.bytes;
    unit.outputs.push_back({std::move(part.name), part.dtype, part.shape, part.bytes});
  }
  report_.quantized_parameters += unit.parameters;
  units_.push_back(std::move(unit));
  return bytes;
}

/// Plans the plain tensors of a module that no quantized format holds; returns their size.
int64_t CheckpointImporter::PlanFloats(const ModuleRecord& record, size_t tensor) {
  const WeightsSpec& spec = record.module.spec;
  const DType dtype = UnquantizedDType(spec.format);
  const Shape matrix =
      record.layout == SourceLayout::kOutIn ? Shape{spec.n, spec.k} : Shape{spec.k, spec.n};
  const int64_t bytes = matrix.ElementCount() * DTypeBytes(dtype);
  const size_t star = record.module.name.find('*');
  report_.skipped.push_back(
      {record.module.name, fmt::format("no format of codes holds it: {}", DTypeName(dtype))});
  const bool apart = star != std::string::npos;
  for (int64_t e = 0; e < (apart ? spec.experts : 1); ++e) {
    ImportUnit unit;
    unit.record = &record;
    unit.tensor = tensor;
    unit.expert = e;
    unit.parameters = (apart ? 1 : spec.experts) * spec.k * spec.n;
    std::string name = record.module.name;
    if (apart) name.replace(star, 1, std::to_string(e));
    const Shape shape =
        apart || !record.stacked ? matrix : Shape{spec.experts, matrix[0], matrix[1]};
    unit.outputs = {{std::move(name), dtype, shape, shape.ElementCount() * DTypeBytes(dtype)}};
    units_.push_back(std::move(unit));
  }
  return spec.experts * bytes;
}

void CheckpointImporter::PlanCopy(size_t tensor) {
  const TensorInfo& info = source_.tensors[tensor];
  ImportUnit unit;
  unit.tensor = tensor;
  unit.parameters = info.shape.ElementCount();
  unit.outputs = {{info.name, info.dtype, info.shape, info.bytes}};
  if (info.shape.rank() >= 2 && info.bytes > 0) {
    report_.skipped.push_back(
        {info.name, fmt::format("the source stores it in {}", DTypeName(info.dtype))});
  }
  report_.source_bytes += info.bytes;
  units_.push_back(std::move(unit));
}

Status CheckpointImporter::Plan() {
  for (const ModuleRecord& record : source_.reader->modules()) {
    MARLIN_RETURN_IF_ERROR(PlanModule(record));
  }
  for (size_t i = 0; i < source_.tensors.size(); ++i) {
    if (!source_.is_part[i]) PlanCopy(i);
  }
  for (const ImportUnit& unit : units_) {
    report_.parameters += unit.parameters;
    for (const OutputTensor& tensor : unit.outputs) report_.bytes += tensor.bytes;
  }
  for (const ContainedFile& file : source_.reader->Files()) {
    if (!file.obstacle.empty()) report_.files.push_back({file.name, file.obstacle});
  }
  report_.method = source_.quant_method;
  report_.tensors = static_cast<int64_t>(units_.size());
  if (report_.parameters > 0) {
    const auto parameters = static_cast<double>(report_.parameters);
    report_.bits_per_weight = 8.0 * static_cast<double>(report_.bytes) / parameters;
    report_.coverage = static_cast<double>(report_.quantized_parameters) / parameters;
  }
  // In file order, so that every file is read once, front to back.
  const auto place = [this](const ImportUnit& unit) {
    return std::pair(source_.tensor_file[unit.tensor], source_.tensors[unit.tensor].offset);
  };
  std::stable_sort(
      units_.begin(), units_.end(),
      [&place](const ImportUnit& a, const ImportUnit& b) { return place(a) < place(b); });
  return {};
}

Status CheckpointImporter::WriteModule(TensorWriter* writer, size_t unit,
                                       const ModuleRecord& record) {
  const std::optional<size_t> rounded = units_[unit].rounded;
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights,
                          rounded ? LoadRounded(record, &report_.modules[*rounded])
                                  : checkpoint_.Weights(record.module.name));
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
  return {};
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

Status CheckpointImporter::WriteFloats(TensorWriter* writer, size_t unit) {
  const ModuleRecord& record = *units_[unit].record;
  const WeightsSpec& spec = record.module.spec;
  // The units of one module follow each other.
  if (loaded_ != &record) {
    MARLIN_ASSIGN_OR_RETURN(weights_, checkpoint_.Weights(record.module.name));
    loaded_ = &record;
  }
  const bool apart = record.module.name.find('*') != std::string::npos;
  const DType dtype = UnquantizedDType(spec.format);
  const int64_t bytes = spec.k * spec.n * DTypeBytes(dtype);
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer dense, AlignedBuffer::Allocate(bytes));
  const bool out_in = record.layout == SourceLayout::kOutIn;
  const MutableTensorView stored(dense.data(), dtype,
                                 out_in ? Shape{spec.n, spec.k} : Shape{spec.k, spec.n});
  const int64_t first = apart ? units_[unit].expert : 0;
  for (int64_t e = first; e < (apart ? first + 1 : spec.experts); ++e) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights slice, SliceExpert(weights_, e));
    MARLIN_RETURN_IF_ERROR(Dequantize(slice, out_in ? stored.Transposed() : stored));
    MARLIN_RETURN_IF_ERROR(writer->Append(unit, 0, dense.data(), bytes));
  }
  return {};
}

Status CheckpointImporter::Write(TensorWriter* writer, size_t unit) {
  const ImportUnit& plan = units_[unit];
  if (plan.record == nullptr) {
    MARLIN_RETURN_IF_ERROR(CopyTensor(source_, plan.tensor, unit, writer));
  } else {
    MARLIN_RETURN_IF_ERROR(GetFormatInfo(plan.record->module.spec.format).quantized
                               ? WriteModule(writer, unit, *plan.record)
                               : WriteFloats(writer, unit));
    for (const PartTensor& part : source_.reader->Parts(*plan.record)) source_.Release(part.tensor);
  }
  done_ += plan.parameters;
  if (options_.progress) options_.progress(done_, report_.parameters);
  return {};
}

// The source's config.json with the description of the modules in place of the source's own.
std::string CheckpointImporter::ConfigText() const {
  Json config = source_.config().is_object() ? source_.config() : Json::object();
  RemoveQuantization(&config);
  QuantizationConfig quantization;
  quantization.recipe_name = "imported";
  quantization.method = source_.quant_method;
  for (const ModuleRecord* const record : modules_) {
    if (GetFormatInfo(record->module.spec.format).quantized) {
      quantization.modules.push_back(*record);
    }
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
  if (options.shard_bytes < 1) {
    return Status(Code::kInvalidArgument,
                  fmt::format("shard_bytes: expected at least 1, got {}", options.shard_bytes));
  }
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
  MARLIN_RETURN_IF_ERROR(importer.Plan());
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = options.overwrite;
  for (const ImportUnit& unit : importer.units()) conversion.units.push_back(unit.outputs);
  conversion.shard_bytes = options.shard_bytes;
  conversion.config_json = importer.ConfigText();
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  if (!options.dry_run) {
    conversion.fingerprint = Fingerprint(
        source, fmt::format("import {} {}", options.shard_bytes, options.allow_requantize));
    conversion.write_unit = [&](TensorWriter* writer, size_t unit) -> Result<int64_t> {
      MARLIN_RETURN_IF_ERROR(importer.Write(writer, unit));
      return 0;
    };
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
  try {
    return ImportImpl(io, source, output, options);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(source) + ": no memory to import it");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, Printable(source) + ": " + Printable(error.what()));
  }
}

Result<ImportCheckpointReport> ImportCheckpoint(const std::string& source,
                                                const std::string& output,
                                                const ImportCheckpointOptions& options) {
  SystemIo io;
  return ImportCheckpointOn(io, source, output, options);
}

}  // namespace marlin
