// Converts a quantized checkpoint to the format of another program.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/seconds_since.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/model_card.h"
#include "checkpoint/convert/unit_converter.h"
#include "checkpoint/decoder_names.h"
#include "checkpoint/module_names.h"
#include "checkpoint/module_writer.h"
#include "layout/plain_weights.h"
#include "marlin/checkpoint.h"
#include "marlin/layout.h"

namespace marlin {

#define MARLIN_WRITER(name, make) MakeWriter make;
#define MARLIN_CONTAINER_WRITER(name, suffix, write, check) \
  WriteContainer write;                                     \
  CheckContainer check;
#include "checkpoint/writers.def"
#undef MARLIN_CONTAINER_WRITER
#undef MARLIN_WRITER

namespace {

constexpr std::string_view kPlain = "plain";
constexpr std::string_view kNoPermutation =
    "its groups lie across k (act-order), which only gptq, plain and, as F32, gguf hold";
constexpr std::string_view kNoInputTransform =
    "its products scale or rotate their inputs, which only plain and, as F32, gguf hold";

/// A row of writers.def; `make` or `write` is set.
struct Writer {
  std::string_view name;
  std::string_view suffix;
  MakeWriter* make = nullptr;
  WriteContainer* write = nullptr;
  CheckContainer* check = nullptr;
};
constexpr Writer kWriters[] = {
#define MARLIN_WRITER(name, make) {name, "", &make, nullptr, nullptr},
#define MARLIN_CONTAINER_WRITER(name, suffix, write, check) {name, suffix, nullptr, &write, &check},
#include "checkpoint/writers.def"
#undef MARLIN_CONTAINER_WRITER
#undef MARLIN_WRITER
};

Result<const Writer*> FindWriter(std::string_view name) {
  std::string known(kPlain);
  for (const Writer& writer : kWriters) {
    if (writer.name == name) return &writer;
    known += ", ";
    known += writer.name;
  }
  return Status(Code::kInvalidArgument, fmt::format("target: unknown format \"{}\"; known: {}",
                                                    Printable(std::string(name)), known));
}

std::string WithoutSuffix(std::string_view name) {
  if (name.ends_with(kWeightSuffix)) name.remove_suffix(kWeightSuffix.size());
  return std::string(name);
}

/// As the output stores a name that has no suffix.
std::string StoredBase(const TensorStore& source, const std::string& name) {
  return WithoutSuffix(StoredName(source, name + std::string(kWeightSuffix)));
}

/// The modules that a writer stores for a record: one, or one for each expert. Errors: kUnsupported
/// for a layout that it does not have.
Result<std::vector<ForeignModule>> ForeignModules(const ModuleWriter& writer,
                                                  const ModuleRecord& record) {
  MARLIN_RETURN_IF_ERROR(CheckForeignLayout(record));
  ForeignModule module;
  module.name = WithoutSuffix(record.module.name);
  module.spec = PlainSpec(record.module.spec);
  module.stacked = record.stacked && writer.StacksExperts();
  if (module.spec.has_permutation && !writer.HoldsPermutation()) {
    return Status(Code::kUnsupported, std::string(kNoPermutation));
  }
  if (module.spec.has_input_scale || module.spec.input_hadamard > 0) {
    return Status(Code::kUnsupported, std::string(kNoInputTransform));
  }
  std::vector<ForeignModule> modules;
  if (!record.stacked || module.stacked) {
    modules.push_back(std::move(module));
    return modules;
  }
  const std::string name = module.name;
  module.spec.experts = 1;
  for (int64_t e = 0; e < record.module.spec.experts; ++e) {
    module.name = NameWithExpert(name, e);
    modules.push_back(module);
  }
  return modules;
}

// Appends to the tensors of one unit.
class UnitSink final : public TensorSink {
 public:
  UnitSink(TensorWriter* writer, size_t unit) : writer_(writer), unit_(unit) {}
  Status Append(size_t tensor, const void* data, int64_t bytes) override {
    return writer_->Append(unit_, tensor, data, bytes);
  }

 private:
  TensorWriter* writer_;
  size_t unit_;
};

class CheckpointConverter final : public UnitConverter {
 public:
  CheckpointConverter(const Checkpoint& checkpoint, const ModuleWriter& writer,
                      const Progress& progress)
      : UnitConverter(checkpoint, progress), writer_(writer) {}

  Result<std::string> ConfigText() const;
  ModelCard Card() const;

 private:
  Status PlanModule(const ModuleRecord& record) override;
  void PlanCopy(const TensorInfo& tensor) override;
  Result<QuantizedWeights> LoadModule(const ModuleRecord& record) override;
  Status WriteExpert(TensorWriter* writer, size_t unit, const QuantizedWeights& expert,
                     int64_t number) override;

  const ModuleWriter& writer_;
  std::vector<ForeignModule> modules_;
  std::vector<std::string> plain_;
};

Status CheckpointConverter::PlanModule(const ModuleRecord& record) {
  Result<std::vector<ForeignModule>> modules = ForeignModules(writer_, record);
  if (!modules.ok()) return InModule(record, modules.status());
  int64_t first = 0;
  for (ForeignModule& module : *modules) {
    Result<OutputUnit> planned = writer_.Plan(module);
    if (!planned.ok()) return InModule(record, planned.status());
    AddUnit(record, first, module.spec.experts, *std::move(planned));
    first += module.spec.experts;
    module.name = StoredBase(source_, module.name);
    modules_.push_back(std::move(module));
  }
  return {};
}

void CheckpointConverter::PlanCopy(const TensorInfo& tensor) {
  const LayerClass of = ClassifyTensor(tensor.name);
  const bool matrix = tensor.shape.rank() == 2 && tensor.name.ends_with(kWeightSuffix) &&
                      of != LayerClass::kEmbedding && of != LayerClass::kNorm;
  if (matrix) plain_.push_back(WithoutSuffix(StoredName(source_, tensor.name)));
}

Result<std::string> CheckpointConverter::ConfigText() const {
  Json config = source_.config();
  if (!config.is_object()) config = Json::object();
  RemoveQuantization(&config);
  MARLIN_RETURN_IF_ERROR(
      writer_.Configure(modules_, plain_, &config).WithContext(Printable(source_.path)));
  return DumpJson(config, 2) + "\n";
}

ModelCard CheckpointConverter::Card() const {
  ModelCard card;
  card.parameters = parameters();
  for (const SourceUnit& unit : units()) {
    for (const OutputTensor& tensor : unit.outputs) card.bytes += tensor.bytes;
    const bool matrix = unit.record == nullptr && unit.outputs.front().shape.rank() >= 2;
    if (!matrix) continue;
    const OutputTensor& tensor = unit.outputs.front();
    card.skipped.push_back(
        {tensor.name, fmt::format("the source stores it in {}", DTypeName(tensor.dtype))});
  }
  for (const ModuleRecord& record : source_.reader->modules()) {
    const WeightsSpec& spec = record.module.spec;
    card.quantized_parameters += spec.experts * spec.k * spec.n;
    card.modules.push_back({spec, "every weight as in the source"});
  }
  card.method = source_.quantized() ? "codes of metal-marlin, kept"
                                    : fmt::format("codes of {}, kept", source_.quant_method);
  card.recipe = source_.reader->recipe_name();
  return card;
}

Result<QuantizedWeights> CheckpointConverter::LoadModule(const ModuleRecord& record) {
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights stored, checkpoint_.Weights(record.module.name));
  // The other programs' formats are dense, with one level of scales.
  return ConvertTo(PlainSpec(stored.spec), stored);
}

Status CheckpointConverter::WriteExpert(TensorWriter* writer, size_t unit,
                                        const QuantizedWeights& expert, int64_t /*number*/) {
  UnitSink sink(writer, unit);
  const Status status = writer_.Write(expert, &sink);
  return status.ok() ? status : InModule(*units()[unit].record, status);
}

Status WriteDirectory(Io& io, const Checkpoint& checkpoint, const Writer& target,
                      const std::string& output, const ConvertCheckpointOptions& options) {
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  if (source.reader->modules().empty()) {
    return Status(Code::kInvalidArgument,
                  Printable(source.path) + ": has no quantized modules; quantize it first");
  }
  const std::unique_ptr<const ModuleWriter> writer = target.make();
  CheckpointConverter converter(checkpoint, *writer, options.progress);
  MARLIN_RETURN_IF_ERROR(converter.Plan());
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = options.overwrite;
  conversion.shard_bytes = options.shard_bytes;
  converter.Attach(&conversion);
  MARLIN_ASSIGN_OR_RETURN(conversion.config_json, converter.ConfigText());
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  conversion.fingerprint =
      Fingerprint(source, fmt::format("convert {} {}", target.name, options.shard_bytes));
  if (options.model_card) {
    conversion.model_card = [&] {
      ModelCard card = converter.Card();
      card.output = output;
      card.target = target.name;
      card.library = target.name == "mlx" ? "mlx" : "transformers";
      return ModelCardText(io, source, card);
    };
  }
  return RunConversion(io, source, conversion).status();
}

Status ConvertImpl(Io& io, const std::string& source, const std::string& output,
                   const ConvertCheckpointOptions& options, ConvertCheckpointReport* report) {
  MARLIN_RETURN_IF_ERROR(CheckShardBytes(options.shard_bytes));
  if (options.target == kPlain) {
    return DequantizeCheckpointOn(io, source, output, DType::kF32, options.overwrite,
                                  options.shard_bytes, options.progress,
                                  {options.allow_extra_tensors});
  }
  MARLIN_ASSIGN_OR_RETURN(const Writer* const writer, FindWriter(options.target));
  MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          CheckpointAccess::Open(io, source, {options.allow_extra_tensors}));
  report->notes = checkpoint.notes();
  if (writer->write == nullptr) return WriteDirectory(io, checkpoint, *writer, output, options);
  const int64_t shard_bytes = output.ends_with(writer->suffix) ? 0 : options.shard_bytes;
  MARLIN_ASSIGN_OR_RETURN(
      report->files,
      writer->write(io, checkpoint, {output, options.overwrite, shard_bytes, options.progress}));
  return {};
}

}  // namespace

Status CheckForeignLayout(const ModuleRecord& record) {
  if (record.layout == SourceLayout::kInOut) {
    return Status(Code::kUnsupported,
                  "the model stores this matrix as [in, out], other formats hold [out, in]; plain "
                  "holds it");
  }
  if (record.stacked && !HasExpertNames(record)) {
    return Status(Code::kUnsupported,
                  fmt::format("one tensor holds {} experts, other formats have one for each "
                              "projection; plain holds it",
                              record.module.spec.experts));
  }
  return {};
}

Status CheckModule(const Checkpoint& source, std::string_view target, const ModuleRecord& record) {
  MARLIN_ASSIGN_OR_RETURN(const Writer* const writer, FindWriter(target));
  if (writer->check != nullptr) return writer->check(source, {&record, 1});
  const std::unique_ptr<const ModuleWriter> directory = writer->make();
  MARLIN_ASSIGN_OR_RETURN(const std::vector<ForeignModule> modules,
                          ForeignModules(*directory, record));
  // Experts of one module are alike.
  return directory->Plan(modules.front()).status();
}

Status CheckConversion(const Checkpoint& source, std::string_view target,
                       std::span<const ModuleRecord> records) {
  MARLIN_ASSIGN_OR_RETURN(const Writer* const writer, FindWriter(target));
  if (writer->check != nullptr) return writer->check(source, records);
  const std::unique_ptr<const ModuleWriter> directory = writer->make();
  std::vector<ForeignModule> all;
  for (const ModuleRecord& record : records) {
    MARLIN_ASSIGN_OR_RETURN(std::vector<ForeignModule> modules, ForeignModules(*directory, record));
    std::move(modules.begin(), modules.end(), std::back_inserter(all));
  }
  Json config = CheckpointAccess::Get(source).config();
  if (!config.is_object()) config = Json::object();
  return directory->Configure(all, {}, &config);
}

Result<ConvertCheckpointReport> ConvertCheckpointOn(Io& io, const std::string& source,
                                                    const std::string& output,
                                                    const ConvertCheckpointOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  ConvertCheckpointReport report;
  report.output = output;
  report.target = options.target;
  MARLIN_RETURN_IF_ERROR(WithoutExceptions(
      source, "convert", [&] { return ConvertImpl(io, source, output, options, &report); }));
  report.seconds = SecondsSince(start);
  return report;
}

Result<ConvertCheckpointReport> ConvertCheckpoint(const std::string& source,
                                                  const std::string& output,
                                                  const ConvertCheckpointOptions& options) {
  SystemIo io;
  return ConvertCheckpointOn(io, source, output, options);
}

std::vector<std::string> ConversionTargets() {
  std::vector<std::string> names = {std::string(kPlain)};
  for (const Writer& writer : kWriters) names.emplace_back(writer.name);
  return names;
}

}  // namespace marlin
