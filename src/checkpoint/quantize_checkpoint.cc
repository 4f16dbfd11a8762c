#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/macros.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/conversion.h"
#include "checkpoint/convert.h"
#include "checkpoint/matrix_quantizer.h"
#include "checkpoint/model_card.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/tiled_codes.h"
#include "marlin/checkpoint.h"
#include "marlin/layout.h"
#include "quantize/quantizer.h"

namespace marlin {
namespace {

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
        marks_(plan.units.size(), kAsPlanned) {}

  Result<int64_t> Write(TensorWriter* writer, size_t unit);
  /// For a unit that an interrupted run wrote, with its mark.
  void Skip(size_t unit, char mark);
  char mark(size_t unit) const { return marks_[unit]; }
  /// The plan with the modules as they were written.
  QuantizePlan Written() const;

 private:
  /// A source tensor, and the expert in a tensor that stacks them, else -1.
  struct SourceMatrix {
    size_t tensor;
    int64_t expert;
  };
  Status Transform();
  /// Marks of units: matrices as planned, or without the plan's Hadamard blocks.
  static constexpr char kAsPlanned = '0';
  static constexpr char kNotRotated = '1';

  Status WriteCast(TensorWriter* writer, size_t unit);
  void AdvanceUnit(size_t unit);
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
  std::string marks_;  ///< By unit.
  bool transformed_ = false;
  int64_t done_ = 0;
};

void UnitQuantizer::Advance(int64_t parameters) {
  done_ += parameters;
  if (options_.progress) options_.progress(done_, plan_.parameters);
}

void UnitQuantizer::Skip(size_t unit, char mark) {
  marks_[unit] = mark == kNotRotated ? kNotRotated : kAsPlanned;
  AdvanceUnit(unit);
}

QuantizePlan UnitQuantizer::Written() const {
  QuantizePlan written = plan_;
  for (size_t unit = 0; unit < written.units.size(); ++unit) {
    if (marks_[unit] == kNotRotated) written.units[unit].record.module.spec.input_hadamard = 0;
  }
  return written;
}

void UnitQuantizer::AdvanceUnit(size_t unit) {
  int64_t parameters = 0;
  for (const size_t tensor : plan_.units[unit].sources) {
    parameters += source_.tensors[tensor].shape.ElementCount();
  }
  Advance(parameters);
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
    marks_[unit] = kNotRotated;
    expected.input_hadamard = 0;
  }
  if (!(weights.spec == expected)) {
    return Status(Code::kInternal, "quantized weights differ from the plan");
  }
  const auto append = [&](size_t part, const TensorView& view) {
    return writer->Append(unit, part, view.data(), view.ByteCount());
  };
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
    MARLIN_RETURN_IF_ERROR(append(index, *PartView(weights, stored.part)));
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
  const int64_t matrix_bytes = view.dim(1) * view.dim(2) * DTypeBytes(view.dtype());
  for (int64_t e = 0; e < view.dim(0); ++e) {
    const auto* data = static_cast<const std::byte*>(view.data()) + e * matrix_bytes;
    const TensorView matrix(data, view.dtype(), {view.dim(1), view.dim(2)});
    Result<int64_t> groups = WriteMatrix(writer, unit, {tensor, e}, matrix, e + 1 == view.dim(0));
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
    AdvanceUnit(unit);
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

// The source's config.json plus the description of the quantized modules.
std::string ConfigText(const Checkpoint::Impl& source, const QuantizePlan& plan,
                       const QuantizeCheckpointOptions& options, const Json& recipe) {
  QuantizationConfig quantization;
  quantization.recipe_name = options.recipe.name();
  quantization.method = QuantizeMethodName(options.method);
  for (const PlanUnit& unit : plan.units) {
    if (unit.action == PlanUnit::Action::kQuantize) quantization.modules.push_back(unit.record);
  }
  Json config = source.config().is_object() ? source.config() : Json::object();
  RemoveQuantization(&config);
  config["quantization_config"] = BuildQuantizationConfig(quantization, recipe);
  return DumpJson(config, 2) + "\n";
}

/// Matrices with Hadamard blocks.
int64_t RotatedMatrices(const QuantizePlan& plan) {
  return std::count_if(plan.units.begin(), plan.units.end(), [](const PlanUnit& unit) {
    return unit.action == PlanUnit::Action::kQuantize && unit.record.module.spec.input_hadamard > 0;
  });
}

Status CheckQuantizable(const Checkpoint::Impl& source, const QuantizeCheckpointOptions& options) {
  if (options.shard_bytes < 1) {
    return Status(Code::kInvalidArgument,
                  fmt::format("shard_bytes: expected at least 1, got {}", options.shard_bytes));
  }
  if (source.quant_method.empty()) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("{}: is quantized already, with {}", Printable(source.path),
                            Printable(source.quant_method)));
}

QuantizeCheckpointReport ReportOf(const Checkpoint::Impl& source, const QuantizePlan& plan,
                                  const std::string& output) {
  QuantizeCheckpointReport report;
  report.output = output;
  report.tensors = static_cast<int64_t>(source.tensors.size());
  report.parameters = plan.parameters;
  report.quantized_parameters = plan.quantized_parameters;
  report.bytes = plan.bytes;
  report.skipped = plan.skipped;
  report.rotatable = RotatedMatrices(plan);
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
                 const QuantizeCheckpointReport& report) {
  ModelCard card;
  card.output = report.output;
  card.target = card.library = "metal-marlin";
  card.method = QuantizeMethodName(options.method);
  card.recipe = options.recipe.name();
  card.parameters = report.parameters;
  card.quantized_parameters = report.quantized_parameters;
  card.bytes = report.bytes;
  for (const PlanUnit& unit : plan.units) {
    if (unit.action != PlanUnit::Action::kQuantize) continue;
    card.modules.push_back({unit.record.module.spec, "rounded"});
  }
  card.skipped = report.skipped;
  return card;
}

Result<QuantizeCheckpointReport> QuantizeImpl(Io& io, const std::string& source_path,
                                              const std::string& output,
                                              const QuantizeCheckpointOptions& options,
                                              MatrixQuantizer* quantizer) {
  const auto start = std::chrono::steady_clock::now();
  MARLIN_ASSIGN_OR_RETURN(Checkpoint checkpoint, CheckpointAccess::Open(io, source_path));
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  MARLIN_RETURN_IF_ERROR(CheckQuantizable(source, options));
  MARLIN_ASSIGN_OR_RETURN(QuantizePlan plan, PlanQuantize(source, options));
  if (quantizer != nullptr) MARLIN_RETURN_IF_ERROR(quantizer->Begin(&plan));
  MARLIN_ASSIGN_OR_RETURN(const Json recipe, ParseJsonObject(options.recipe.ToJson(), "recipe"));
  QuantizeCheckpointReport report = ReportOf(source, plan, output);
  Conversion conversion;
  conversion.target = output;
  conversion.options.overwrite = options.overwrite;
  conversion.options.resume = options.resume;
  for (const PlanUnit& unit : plan.units) conversion.units.push_back(unit.outputs);
  conversion.shard_bytes = options.shard_bytes;
  conversion.config_json = ConfigText(source, plan, options, recipe);
  MARLIN_RETURN_IF_ERROR(CheckReadable(io, source, conversion));
  if (!options.dry_run) {
    ThreadPool pool(0);
    UnitQuantizer units(pool, &checkpoint, plan, options, quantizer);
    conversion.fingerprint =
        Fingerprint(source, fmt::format("quantize {} {} {}", options.shard_bytes,
                                        quantizer == nullptr ? "" : quantizer->Identity(),
                                        conversion.config_json));
    conversion.write_unit = [&](TensorWriter* writer, size_t unit) {
      return units.Write(writer, unit);
    };
    conversion.skip_unit = [&](size_t unit, char mark) { units.Skip(unit, mark); };
    if (RotatedMatrices(plan) > 0) {
      conversion.mark = [&](size_t unit) { return units.mark(unit); };
      conversion.written_config = [&] {
        return ConfigText(source, units.Written(), options, recipe);
      };
    }
    if (options.model_card) {
      conversion.model_card = [&] {
        return ModelCardText(io, source, CardOf(units.Written(), options, report));
      };
    }
    MARLIN_ASSIGN_OR_RETURN(report.zeroed_groups, RunConversion(io, source, conversion));
    report.rotated = RotatedMatrices(units.Written());
    if (quantizer != nullptr) {
      report.fallbacks = quantizer->fallbacks();
      report.inputs = quantizer->inputs();
      report.scaled_inputs = quantizer->scaled_inputs();
    }
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace

Result<QuantizeCheckpointReport> QuantizeCheckpointOn(Io& io, const std::string& source,
                                                      const std::string& output,
                                                      const QuantizeCheckpointOptions& options,
                                                      MatrixQuantizer* quantizer) {
  try {
    return QuantizeImpl(io, source, output, options, quantizer);
  } catch (const ThreadStartError& error) {
    return Status(Code::kOutOfMemory, Printable(source) + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(source) + ": no memory to quantize it");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, Printable(source) + ": " + Printable(error.what()));
  }
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
