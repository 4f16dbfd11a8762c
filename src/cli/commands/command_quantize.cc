// quantize: converts a plain checkpoint to a quantized directory.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <climits>
#include <csignal>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/seconds_since.h"
#include "base/text_table.h"
#include "checkpoint/convert/destination_output.h"
#include "cli/arguments/calibration_arguments.h"
#include "cli/arguments/destination_argument.h"
#include "cli/arguments/device_argument.h"
#include "cli/arguments/model_arguments.h"
#include "cli/arguments/recipe_arguments.h"
#include "cli/arguments/target_arguments.h"
#include "cli/checkpoint_listing.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "marlin/calibrate.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/importance.h"
#include "marlin/model.h"
#include "marlin/sensitivity.h"
#include "text/documents.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace marlin::cli {
namespace {

/// Keeps freed memory in the process. Calibration frees and takes the same gigabyte for every
/// layer, and the kernel clears pages that come back to it: a quarter of the time on a GPU.
void KeepFreedMemory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
}

/// Ends the process on an interrupt with a hint on how to resume. The output has a temporary name
/// until it is complete, so there is nothing to clean up.
class InterruptNotice {
 public:
  InterruptNotice() { previous_ = std::signal(SIGINT, &InterruptNotice::Handle); }
  ~InterruptNotice() { std::signal(SIGINT, previous_); }
  InterruptNotice(const InterruptNotice&) = delete;
  InterruptNotice& operator=(const InterruptNotice&) = delete;

 private:
  static void Handle(int) {
    constexpr char kText[] =
        "\nmetal-marlin: interrupted; the output is unchanged; run the same command with "
        "--resume to continue\n";
    (void)!write(STDERR_FILENO, kText, sizeof(kText) - 1);
    _exit(130);
  }
  void (*previous_)(int) = nullptr;
};

/// The part of the summary about matrices: those without codes, and those that the method changed.
std::string MatrixLines(const QuantizeCheckpointReport& report, bool dry_run) {
  std::string text = CoverageLines(report.coverage, report.skipped) + EndsLine(report.ends);
  if (report.zeroed_groups > 0) {
    text +=
        fmt::format("{} groups became zero because their scales are too small for the scale type\n",
                    FormatInteger(report.zeroed_groups));
  }
  if (report.inputs > 0) {
    text += fmt::format("awq: scaled {} of {} inputs\n", FormatInteger(report.scaled_inputs),
                        FormatInteger(report.inputs));
  }
  if (report.rotatable > 0 && !dry_run) {
    text += fmt::format("rotated the inputs of {} of {} matrices, where it lowers the error\n",
                        FormatInteger(report.rotated), FormatInteger(report.rotatable));
  }
  return text;
}

/// The part of the summary about experts that no token of a text selects; empty if there are none.
std::string UnselectedLines(const std::vector<std::string>& experts) {
  if (experts.empty()) return {};
  std::vector<SkippedTensor> rows;
  rows.reserve(experts.size());
  for (const std::string& expert : experts) rows.push_back({expert, "gptq"});
  return "experts that no token selects, calibrated on the inputs of all:\n" + SkippedLines(rows);
}

class QuantizeCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("SRC", &source_,
                         "An unquantized Hugging Face directory, .safetensors or GGUF file");
    arguments.Model(&source_);
    arguments.Group("Output");
    arguments.RequiredOption("-o,--output", &output_, "DST",
                             "The directory to write, or the file of --for; it appears whole or "
                             "not at all");
    arguments.Flag("--overwrite", &overwrite_, "Replace DST if it exists");
    arguments.Flag("--resume", &resume_, "Resume an interrupted run");
    arguments.Flag("--dry-run", &dry_run_, "Plan and report, write nothing");
    arguments.Option("--shard-size", &shard_size_, "SIZE", "Largest file to write");
    arguments.Option("--layout", &layout_, "LAYOUT",
                     "Layout of dense 4-bit codes: k_packed, or marlin_w4 for other programs");
    arguments.Choices({"k_packed", "marlin_w4"});
    arguments.Option("--write-recipe", &recipe_file_, "FILE", "Also writes the recipe to FILE");
    arguments.Flag("--no-model-card", &no_model_card_, "Write no README.md");
    arguments.Group("Formats");
    destination_.Declare(arguments);
    recipe_arguments_.Declare(arguments);
    arguments.Flag("--strict", &strict_, "A matrix that cannot be quantized is an error");
    arguments.Group("Formats for a number of bits");
    target_.Declare(arguments);
    arguments.Group("Method");
    arguments.Option("--method", &method_, "METHOD",
                     "rtn, mse, or, measuring the inputs of every layer on a text, gptq, awq or "
                     "awq+gptq");
    arguments.Choices(AllQuantizeMethods(), QuantizeMethodName);
    arguments.Option("--imatrix", &imatrix_, "FILE",
                     "mse: weights errors by the inputs in an importance matrix of llama.cpp");
    arguments.Option("--pruning", &pruning_, "METHOD",
                     "gptq, for 2:4: magnitude, weighted (by the inputs), or compensated, the "
                     "default; other methods prune by magnitude");
    arguments.Choices({"magnitude", "weighted", "compensated"});
    arguments.Group("Calibration for gptq, awq and --target-bpw");
    calibration_.Declare(arguments, "", "default 16384 or more; for --target-bpw 2048");
    arguments.Option("--device", &device_, "DEVICE",
                     "Where the model runs; other methods run on the cpu, and auto is the same");
    arguments.Choices(DeviceChoices());
    arguments.Group("Source");
    arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                   "Leave out tensors that the index does not list or the model does not have");
  }

  Status Check(const Console& console) const override {
    MARLIN_ASSIGN_OR_RETURN(const QuantizeMethod method, ParseQuantizeMethod(method_));
    MARLIN_RETURN_IF_ERROR(CheckMethod(method));
    MARLIN_RETURN_IF_ERROR(CheckDestination());
    return CheckCalibration(console, method);
  }

  Status Run(Console& console) override {
    QuantizeCheckpointOptions options;
    MARLIN_ASSIGN_OR_RETURN(options.method, ParseQuantizeMethod(method_));
    const Result<PackedLayout> layout = ParsePackedLayout(layout_);
    if (!layout.ok()) {
      return Status(layout.status().code(), "--" + std::string(layout.status().message()));
    }
    options.layout = *layout;
    MARLIN_ASSIGN_OR_RETURN(options.shard_bytes, ParseByteSize("--shard-size", shard_size_));
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint source,
                            Checkpoint::Open(source_, {allow_extra_tensors_}));
    if (source.quantized()) {
      return Invalid(fmt::format("{}: is quantized already (recipe {}); quantize its source",
                                 source_, source.recipe_name()));
    }
    std::optional<FormatAssignment> assignment;
    const auto start = std::chrono::steady_clock::now();
    if (target_.given()) {
      MARLIN_ASSIGN_OR_RETURN(assignment, Assign(console, source));
      options.recipe = assignment->recipe;
      search_seconds_ = SecondsSince(start);
    } else {
      MARLIN_ASSIGN_OR_RETURN(options.recipe, destination_.given()
                                                  ? destination_.Recipe(recipe_arguments_, source)
                                                  : recipe_arguments_.Build(HasExperts(source)));
    }
    if (recipe_file_) {
      MARLIN_RETURN_IF_ERROR(WriteText(*recipe_file_, options.recipe.ToJson() + "\n"));
    }
    options.strict = strict_;
    options.dry_run = dry_run_;
    options.allow_extra_tensors = allow_extra_tensors_;
    options.resume = resume_;
    // An earlier run's directory for --for is replaced.
    options.overwrite = overwrite_ || destination_.given();
    options.model_card = !no_model_card_;
    std::optional<IntermediateFolder> intermediate;
    directory_ = output_;
    if (destination_.given() && !dry_run_) {
      MARLIN_ASSIGN_OR_RETURN(IntermediateFolder folder, IntermediateFolder::Make(output_));
      intermediate.emplace(std::move(folder));
      directory_ = intermediate->quantized();
    }
    ProgressBar bar(console, "quantize");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    Result<QuantizeCheckpointReport> report = [&] {
      const InterruptNotice notice;
      if (NeedsCalibration(options.method)) {
        KeepFreedMemory();
        return Calibrate(console, options);
      }
      return imatrix_ ? Weigh(options) : QuantizeCheckpoint(source_, directory_, options);
    }();
    bar.Clear();
    if (!report.ok()) return report.status();
    if (destination_.given()) MARLIN_RETURN_IF_ERROR(Export(console, options, &*report));
    report->seconds = SecondsSince(start);
    return console.json() ? PrintDocument(console, *report, options, assignment)
                          : PrintSummary(console, *report, options.recipe, assignment);
  }

 private:
  Status CheckMethod(QuantizeMethod method) const {
    if (target_.given() && recipe_arguments_.given()) {
      return Invalid(
          "--target-bpw chooses the formats: it excludes --recipe, --format, "
          "--group-size, --scale-dtype, --sparsity, --hadamard and --override");
    }
    const bool runs_model = NeedsCalibration(method) || target_.measures();
    if (!runs_model && device_ != "cpu" && device_ != "auto") {
      return Status(Code::kUnsupported,
                    fmt::format("--device {}: {} runs on cpu", device_, method_));
    }
    if (imatrix_ && method_ != "mse") {
      return Invalid("--imatrix: needs --method mse");
    }
    return target_.Check();
  }

  Status CheckDestination() const {
    if (!destination_.given()) return {};
    if (target_.given()) {
      return Invalid(
          "--for and --target-bpw exclude each other: quantize to a directory with "
          "--formats that the program loads, and export that");
    }
    if (layout_ != "k_packed") {
      return Invalid("--layout: the program that --for names has its own");
    }
    return destination_.Check(output_, overwrite_ || dry_run_);
  }

  /// Writes the output of --for.
  Status Export(const Console& console, const QuantizeCheckpointOptions& quantized,
                QuantizeCheckpointReport* report) {
    report->output = output_;
    if (dry_run_) return {};
    ConvertCheckpointOptions options;
    options.overwrite = overwrite_;
    options.shard_bytes = quantized.shard_bytes;
    options.model_card = !no_model_card_;
    ProgressBar bar(console, "export");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    MARLIN_ASSIGN_OR_RETURN(ConvertCheckpointReport exported,
                            destination_.Export(directory_, output_, options));
    files_ = std::move(exported.files);
    return {};
  }

  Status CheckCalibration(const Console& console, QuantizeMethod method) const {
    if (calibration_.given() && !NeedsCalibration(method) && !target_.measures()) {
      return Invalid(fmt::format("--method {}: uses no calibration", method_));
    }
    if (pruning_) {
      MARLIN_ASSIGN_OR_RETURN(const PruneMethod pruning, ParsePruneMethod(*pruning_));
      if (pruning != PruneMethod::kMagnitude && !UsesGptq(method)) {
        return Invalid(
            fmt::format("--pruning {}: needs --method gptq, which measures the inputs", *pruning_));
      }
    }
    return calibration_.Check(console);
  }

  Result<QuantizeCheckpointReport> Calibrate(const Console& console,
                                             const QuantizeCheckpointOptions& options) const {
    MARLIN_ASSIGN_OR_RETURN(CalibrationOptions calibration, calibration_.Read(console, source_));
    if (pruning_) {
      MARLIN_ASSIGN_OR_RETURN(calibration.pruning, ParsePruneMethod(*pruning_));
    }
    ProgressBar bar(console, "scale");
    calibration.progress = [&bar](int64_t done, int64_t total) {
      bar.Update(done, total);
      if (done == total) bar.Clear();
    };
    MARLIN_ASSIGN_OR_RETURN(const Device device, Device::Open(device_));
    return QuantizeCalibrated(source_, directory_, device, options, calibration);
  }

  Result<QuantizeCheckpointReport> Weigh(const QuantizeCheckpointOptions& options) const {
    MARLIN_ASSIGN_OR_RETURN(const ImportanceMatrix importance,
                            ImportanceMatrix::FromFile(*imatrix_));
    return QuantizeWithImportance(source_, directory_, options, importance);
  }

  Result<FormatAssignment> Assign(const Console& console, const Checkpoint& source) const {
    if (!target_.measures()) {
      MARLIN_ASSIGN_OR_RETURN(const Sensitivity sensitivity, target_.Read());
      return target_.Assign(source, sensitivity);
    }
    SensitivityOptions options;
    MARLIN_ASSIGN_OR_RETURN(options.formats, target_.Formats());
    options.target = target_.target();
    MARLIN_ASSIGN_OR_RETURN(options.text, calibration_.Read(console, source_));
    MARLIN_ASSIGN_OR_RETURN(const Device device, Device::Open(device_));
    ProgressBar bar(console, "measure");
    options.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); };
    MARLIN_ASSIGN_OR_RETURN(const Sensitivity sensitivity,
                            MeasureSensitivity(source_, device, options));
    return target_.Assign(source, sensitivity);
  }

  Status PrintDocument(Console& console, const QuantizeCheckpointReport& report,
                       const QuantizeCheckpointOptions& options,
                       const std::optional<FormatAssignment>& assignment) const {
    nlohmann::ordered_json document = QuantizedDocument(report, options);
    if (destination_.given()) {
      document["for"] = destination_.name();
      document["files"] = SkippedJson(files_);
    }
    if (assignment) {
      document["predicted_kl"] = assignment->predicted_kl;
      document["search_seconds"] = search_seconds_;
    }
    return console.PrintJson(document);
  }

  Status PrintSummary(Console& console, const QuantizeCheckpointReport& report,
                      const MixedPrecisionConfig& recipe,
                      const std::optional<FormatAssignment>& assignment) const {
    std::string text =
        fmt::format("{}{}: {} parameters in {}, {}, {:.3f} bits per weight, recipe {}, {:.1f} s\n",
                    dry_run_ ? "(dry run) " : "", report.output, FormatCount(report.parameters),
                    FormatCounted(report.tensors, "tensor"), FormatBytes(report.bytes),
                    report.bits_per_weight, recipe.name(), report.seconds);
    if (assignment) {
      text += fmt::format(
          "--target-bpw {}: {:.4f} bits per weight, scales and zeros included, over the {} "
          "parameters that got a format\n"
          "KL of the choices, summed: {:.4f}; found in {:.1f} s of the time\n",
          target_.target(), assignment->bits_per_weight, FormatCount(assignment->weights),
          assignment->predicted_kl, search_seconds_);
    }
    text += MatrixLines(report, dry_run_);
    if (!report.unsupported_type.empty()) {
      text +=
          fmt::format("note: a '{}' cannot be run here; types that can: {}\n",
                      Printable(report.unsupported_type), fmt::join(SupportedModelTypes(), ", "));
    }
    for (const SkippedTensor& file : files_) text += WithoutLine(file);
    text += NoteLines(report.notes);
    if (!report.fallbacks.empty()) {
      text += fmt::format("data for {} of the quantized parameters; fallbacks:\n{}",
                          FormatPercent(static_cast<double>(report.calibrated_parameters) /
                                        static_cast<double>(report.quantized_parameters)),
                          SkippedLines(report.fallbacks));
    }
    text += UnselectedLines(report.unselected_experts);
    return console.Print(text);
  }

  std::string source_;
  std::string output_;
  std::string directory_;  ///< The quantized directory: the output, or what --for is written from.
  DestinationArgument destination_;
  std::vector<SkippedTensor> files_;  ///< Files that the program of --for has no place for.
  RecipeArguments recipe_arguments_;
  std::string layout_ = "k_packed";
  std::string method_ = "rtn";
  std::string shard_size_ = "5GB";
  std::string device_ = "auto";
  TargetArguments target_;
  std::optional<std::string> recipe_file_;
  CalibrationArguments calibration_;
  std::optional<std::string> pruning_;
  std::optional<std::string> imatrix_;
  double search_seconds_ = 0;  ///< For --target-bpw.
  bool strict_ = false;
  bool dry_run_ = false;
  bool allow_extra_tensors_ = false;
  bool resume_ = false;
  bool overwrite_ = false;
  bool no_model_card_ = false;
};

}  // namespace

std::unique_ptr<Command> Make_quantize() { return std::make_unique<QuantizeCommand>(); }

}  // namespace marlin::cli
