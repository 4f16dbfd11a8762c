// Converts a quantized checkpoint to the format of another program.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/model_card.h"
#include "checkpoint/module_names.h"
#include "checkpoint/module_writer.h"
#include "layout/plain_weights.h"
#include "layout/slice_expert.h"
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
constexpr std::string_view kWildcard = ".*.";
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
#include "base/seconds_since.h"
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
  const size_t wildcard = name.find(kWildcard);
  module.spec.experts = 1;
  for (int64_t e = 0; e < record.module.spec.experts; ++e) {
    module.name = fmt::format("{}{}{}", name.substr(0, wildcard + 1), e, name.substr(wildcard + 2));
    modules.push_back(module);
  }
  return modules;
}

// One unit of output: a module, one expert of it, or a tensor to copy.
struct ConvertUnit {
  const ModuleRecord* record = nullptr;  // Null for a copy.
  int64_t first_expert = 0;
  int64_t experts = 1;
  size_t tensor = 0;  // The copied tensor, or the module's first.
  OutputUnit output;
};

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

class CheckpointConverter {
 public:
  CheckpointConverter(const Checkpoint& checkpoint, const ModuleWriter& writer,
                      const Progress& progress)
      : checkpoint_(checkpoint),
        source_(CheckpointAccess::Get(checkpoint)),
        writer_(writer),
        progress_(progress) {}

  Status PlanUnits();
  Result<std::string> ConfigText() const;
  Status Write(TensorWriter* writer, size_t unit);
  const std::vector<ConvertUnit>& units() const { return units_; }
  ModelCard Card() const;

 private:
  Status PlanModule(const ModuleRecord& record);
  Status InModule(const ModuleRecord& record, const Status& status) const {
    return status.WithContext(
        fmt::format("{}: module \"{}\"", Printable(source_.path), Printable(record.module.name)));
  }

  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;
  const ModuleWriter& writer_;
  const Progress& progress_;
  std::vector<ConvertUnit> units_;
  std::vector<ForeignModule> modules_;
  std::vector<std::string> plain_;
  int64_t total_ = 0;
  int64_t done_ = 0;
  const ModuleRecord* loaded_ = nullptr;
  QuantizedWeights weights_;
};

Status CheckpointConverter::PlanModule(const ModuleRecord& record) {
  Result<std::vector<ForeignModule>> modules = ForeignModules(writer_, record);
  if (!modules.ok()) return InModule(record, modules.status());
  int64_t first = 0;
  for (ForeignModule& module : *modules) {
    ConvertUnit unit;
    unit.record = &record;
    unit.first_expert = first;
    unit.experts = module.spec.experts;
    unit.tensor = source_.reader->Parts(record).front().tensor;
    Result<OutputUnit> planned = writer_.Plan(module);
    if (!planned.ok()) return InModule(record, planned.status());
    unit.output = *std::move(planned);
    for (OutputTensor& tensor : unit.output) {
      tensor.bytes = tensor.shape.ElementCount() * DTypeBytes(tensor.dtype);
    }
    first += module.spec.experts;
    units_.push_back(std::move(unit));
    modules_.push_back(std::move(module));
  }
  return {};
}

Status CheckpointConverter::PlanUnits() {
  for (const ModuleRecord& record : source_.reader->modules()) {
    MARLIN_RETURN_IF_ERROR(PlanModule(record));
    const WeightsSpec& spec = record.module.spec;
    total_ += spec.experts * spec.k * spec.n;
  }
  for (size_t i = 0; i < source_.tensors.size(); ++i) {
    const TensorInfo& tensor = source_.tensors[i];
    if (source_.is_part[i]) continue;
    ConvertUnit unit;
    unit.tensor = i;
    unit.output = {{tensor.name, tensor.dtype, tensor.shape, tensor.bytes}};
    units_.push_back(std::move(unit));
    total_ += tensor.shape.ElementCount();
    const LayerClass of = ClassifyTensor(tensor.name);
    const bool matrix = tensor.shape.rank() == 2 && tensor.name.ends_with(kWeightSuffix) &&
                        of != LayerClass::kEmbedding && of != LayerClass::kNorm;
    if (matrix) plain_.push_back(WithoutSuffix(tensor.name));
  }
  std::stable_sort(
      units_.begin(), units_.end(), [this](const ConvertUnit& a, const ConvertUnit& b) {
        const auto place = [this](const ConvertUnit& unit) {
          return std::pair(source_.tensor_file[unit.tensor], source_.tensors[unit.tensor].offset);
        };
        return place(a) < place(b);
      });
  return {};
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
  card.parameters = total_;
  for (const ConvertUnit& unit : units_) {
    for (const OutputTensor& tensor : unit.output) card.bytes += tensor.bytes;
    const bool matrix = unit.record == nullptr && unit.output.front().shape.rank() >= 2;
    if (!matrix) continue;
    const OutputTensor& tensor = unit.output.front();
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

Status CheckpointConverter::Write(TensorWriter* writer, size_t index) {
  const ConvertUnit& unit = units_[index];
  if (unit.record == nullptr) {
    MARLIN_RETURN_IF_ERROR(CopyTensor(source_, unit.tensor, index, writer));
    done_ += unit.output.front().shape.ElementCount();
    if (progress_) progress_(done_, total_);
    return {};
  }
  const ModuleRecord& record = *unit.record;
  if (loaded_ != &record) {
    if (loaded_ != nullptr) {
      for (const PartTensor& part : source_.reader->Parts(*loaded_)) source_.Release(part.tensor);
    }
    loaded_ = nullptr;
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights stored, checkpoint_.Weights(record.module.name));
    // The other programs' formats are dense, with one level of scales.
    MARLIN_ASSIGN_OR_RETURN(weights_, ConvertTo(PlainSpec(stored.spec), stored));
    loaded_ = &record;
  }
  UnitSink sink(writer, index);
  for (int64_t e = unit.first_expert; e < unit.first_expert + unit.experts; ++e) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights slice, SliceExpert(weights_, e));
    const Status status = writer_.Write(slice, &sink);
    if (!status.ok()) return InModule(record, status);
    done_ += slice.spec.k * slice.spec.n;
    if (progress_) progress_(done_, total_);
  }
  return {};
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
  MARLIN_RETURN_IF_ERROR(converter.PlanUnits());
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = options.overwrite;
  conversion.shard_bytes = options.shard_bytes;
  for (const ConvertUnit& unit : converter.units()) conversion.units.push_back(unit.output);
  MARLIN_ASSIGN_OR_RETURN(conversion.config_json, converter.ConfigText());
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  conversion.fingerprint =
      Fingerprint(source, fmt::format("convert {} {}", target.name, options.shard_bytes));
  conversion.write_unit = [&](TensorWriter* tensors, size_t unit) -> Result<int64_t> {
    MARLIN_RETURN_IF_ERROR(converter.Write(tensors, unit));
    return 0;
  };
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
  if (options.shard_bytes < 1) {
    return Status(Code::kInvalidArgument,
                  fmt::format("shard_bytes: expected at least 1, got {}", options.shard_bytes));
  }
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
  if (record.stacked && record.module.name.find(kWildcard) == std::string::npos) {
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
  try {
    ConvertCheckpointReport report;
    report.output = output;
    report.target = options.target;
    MARLIN_RETURN_IF_ERROR(ConvertImpl(io, source, output, options, &report));
    report.seconds = SecondsSince(start);
    return report;
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(source) + ": no memory to convert it");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, Printable(source) + ": " + Printable(error.what()));
  }
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
