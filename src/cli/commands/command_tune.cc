// tune: measures the fastest kernel for each GEMM and writes the tuning table.
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <system_error>
#include <tuple>

#include "backends/cuda/measure/graph_timer.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "bench/document.h"
#include "bench/gpu.h"
#include "bench/timed_device.h"
#include "bench/tuning_run.h"
#include "cli/arguments/device_argument.h"
#include "cli/arguments/product_arguments.h"
#include "cli/checkpoint_architecture.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "ops/device/tuning_file.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kCpuRows[] = {1, 2, 4, 8, 16, 32, 64, 128};
constexpr int64_t kGpuRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};

/// One weight matrix, or gate and up projections fused.
struct Matrix {
  int64_t n = 0;
  int64_t k = 0;
  bool gated = false;
  friend auto operator<=>(const Matrix&, const Matrix&) = default;
};

/// The attention and MLP matrices of a model of 8 billion parameters.
const std::set<Matrix> kTypicalMatrices = {
    {4096, 4096}, {4096, 14336}, {6144, 4096}, {28672, 4096, true}};

struct Measured {
  bench::BenchCase bench;
  std::vector<bench::KernelTiming> timings;
  const bench::KernelTiming* fastest = nullptr;  ///< Points into timings.
};

/// The matrices of a model's linear layers.
Result<std::set<Matrix>> MatricesOf(const std::string& source) {
  MARLIN_ASSIGN_OR_RETURN(const ModelArchitecture model, DescribeSource(source));
  std::set<Matrix> matrices;
  for (const ModelTensor& tensor : model.tensors) {
    const int rank = tensor.shape.rank();
    const LayerClass layer = tensor.layer_class;
    if (rank < 2 || layer == LayerClass::kEmbedding || layer == LayerClass::kNorm ||
        layer == LayerClass::kMoeRouter || layer == LayerClass::kOther) {
      continue;
    }
    Matrix matrix{tensor.shape[rank - 2], tensor.shape[rank - 1], false};
    if (tensor.input_first) std::swap(matrix.n, matrix.k);
    matrices.insert(matrix);
    // Gate and up projections run as one fused GEMM.
    const bool gate = layer == LayerClass::kMlpGate ||
                      tensor.name.find("gate_proj") != std::string::npos ||
                      tensor.name.find(".w1.") != std::string::npos;
    if (gate) matrices.insert({2 * matrix.n, matrix.k, true});
  }
  if (!matrices.empty()) return matrices;
  return Status(Code::kUnsupported, source + ": has no linear layers");
}

class TuneCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Group("GEMMs");
    arguments.Option("--shape", &shapes_, "M,N,K", "A GEMM; may be repeated");
    arguments.Option("--model", &model_, "DIR",
                     "Measures the linear layers of a model for 1 to 4096 rows (CPU: 128)");
    arguments.Model(&model_, ModelPart::kConfig);
    arguments.Flag("--gated", &gated_,
                   "The GEMMs of --shape are gated: n counts gate and up columns");
    products_.Declare(arguments);
    arguments.Group("Device");
    device_.Declare(arguments, "auto, cpu, cuda, cuda:N or metal");
    arguments.Option("--threads", &threads_, kThreadRange, "N",
                     "Threads of the CPU; default: all processors");
    arguments.Group("Output");
    arguments.Option("-o,--output", &output_, "FILE",
                     "The table to write; default: the file that the library reads, in the user's "
                     "config directory");
    arguments.Option("--commit", &commit_, "HASH",
                     "The commit of this program, which the table names");
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(products_.Read());
    DeviceOptions options;
    options.threads = static_cast<int>(threads_.value_or(0));
    options.tuning_file = "";  // Measured without the table that this command replaces.
    MARLIN_ASSIGN_OR_RETURN(const std::string name, device_.Name());
    MARLIN_RETURN_IF_ERROR(bench::CheckTimed(name));
    MARLIN_ASSIGN_OR_RETURN(const Device device, device_.Open(options));
    gpu_ = device.info().backend == "cuda";
    const bool gpu_batches = device.info().backend != "cpu";
    MARLIN_RETURN_IF_ERROR(ListCases(gpu_batches));
    MARLIN_RETURN_IF_ERROR(ReadOld());
    MARLIN_ASSIGN_OR_RETURN(bench::WholeFile file, bench::WholeFile::Create(output_));
    MARLIN_RETURN_IF_ERROR(MeasureCases(console, device));
    MARLIN_RETURN_IF_ERROR(CheckChoice(device.info()));
    TuningSection section{device.info().model, bench::Today(), commit_, {}};
    for (const Measured& one : measured_) {
      if (one.fastest != nullptr)
        section.entries.push_back(bench::EntryOf(one.bench, *one.fastest));
    }
    ReplaceTuning(std::move(section), sections_);
    MARLIN_RETURN_IF_ERROR(file.Finish(FormatTuning(sections_)));
    return console.json() ? console.PrintJson(Document(device.info())) : console.Print(Text());
  }

 private:
  /// `gpu_batches`: measure models at the batch sizes of GPUs.
  Status ListCases(bool gpu_batches) {
    if (!model_.empty() && !shapes_.empty()) {
      return Invalid("tune: expected --shape or --model, got both");
    }
    if (gated_ && shapes_.empty()) {
      return Invalid("--gated: belongs to --shape");
    }
    std::vector<std::pair<bench::GemmShape, bool>> shapes;
    for (const std::string& text : shapes_) {
      MARLIN_ASSIGN_OR_RETURN(const bench::GemmShape shape, ParseShape(text));
      shapes.emplace_back(shape, gated_);
    }
    if (shapes.empty()) {
      std::set<Matrix> matrices = kTypicalMatrices;
      if (!model_.empty()) {
        MARLIN_ASSIGN_OR_RETURN(matrices, MatricesOf(model_));
      }
      const std::span<const int64_t> rows =
          gpu_batches ? std::span<const int64_t>(kGpuRows) : kCpuRows;
      for (const Matrix& matrix : matrices) {
        for (const int64_t m : rows) {
          shapes.push_back({{m, matrix.n, matrix.k}, matrix.gated});
        }
      }
    }
    const int64_t bytes = gpu_ ? bench::kBeyondL2Bytes : bench::kBeyondCacheBytes;
    std::set<std::tuple<Format, int64_t, int64_t, int64_t, bool>> seen;
    for (const Format format : products_.formats()) {
      for (const auto& [shape, gated] : shapes) {
        if (!seen.emplace(format, shape.m, shape.n, shape.k, gated).second) continue;
        cases_.push_back(products_.MakeCase(format, shape, bytes));
        MARLIN_RETURN_IF_ERROR(CheckCaseFits(cases_.back()));
        cases_.back().options.gated = gated;
        cases_.back().options.kernel = "all";
      }
    }
    return {};
  }

  /// Reads the existing entries; those not measured again are kept.
  Status ReadOld() {
    if (output_.empty()) output_ = DefaultTuningFile();
    if (output_.empty()) {
      return Invalid("-o: required if neither HOME nor XDG_CONFIG_HOME is set");
    }
    std::error_code error;
    if (!std::filesystem::exists(output_, error)) return {};
    MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadTuningFile(output_));
    MARLIN_ASSIGN_OR_RETURN(sections_, ParseTuning(text, output_));
    return {};
  }

  Status MeasureCases(const Console& console, const Device& device) {
    std::unique_ptr<cuda::GraphTimer> timer;
    std::optional<bench::GpuBench> gpu;
    if (gpu_) {
      MARLIN_ASSIGN_OR_RETURN(timer, cuda::OpenGraphTimer(device.info().name));
      gpu.emplace(device, *timer, nullptr);
      MARLIN_RETURN_IF_ERROR(gpu->MeasureCeilings().status());
    }
    ProgressBar progress(console, "measuring");
    PreparedWeights prepared;
    for (const bench::BenchCase& bench : cases_) {
      progress.Update(static_cast<int64_t>(measured_.size()), static_cast<int64_t>(cases_.size()));
      if (!prepared.valid() || !(prepared.spec() == bench.spec)) {
        prepared = PreparedWeights();
        MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, bench::RandomWeights(bench.spec));
        MARLIN_ASSIGN_OR_RETURN(prepared, Prepare(weights, device));
        MARLIN_RETURN_IF_ERROR(device.Synchronize());
      }
      Measured one{bench, {}, nullptr};
      if (gpu) {
        MARLIN_ASSIGN_OR_RETURN(bench::GpuBenchResult result, gpu->Run(prepared, bench, false));
        one.timings = std::move(result.kernels);
      } else {
        MARLIN_ASSIGN_OR_RETURN(one.timings, bench::TimeCandidates(device, prepared, bench));
      }
      measured_.push_back(std::move(one));
      measured_.back().fastest = bench::FastestOf(measured_.back().timings);
    }
    return {};
  }

  /// A table is useless if every GEMM has a single kernel.
  Status CheckChoice(const DeviceInfo& info) const {
    for (const Measured& one : measured_) {
      const auto selectable =
          std::count_if(one.timings.begin(), one.timings.end(),
                        [](const bench::KernelTiming& timing) { return timing.selectable; });
      if (selectable > 1) return {};
    }
    return Status(Code::kUnsupported,
                  fmt::format("tune: {} ({}) has one kernel for each of these GEMMs, so there "
                              "is nothing to choose",
                              info.name, info.model));
  }

  static const bench::KernelTiming* PlannedOf(const Measured& one) {
    const auto planned =
        std::find_if(one.timings.begin(), one.timings.end(),
                     [](const bench::KernelTiming& timing) { return timing.planned; });
    return planned == one.timings.end() ? nullptr : &*planned;
  }

  static double SecondsOf(const bench::KernelTiming& timing) {
    return (timing.chain ? *timing.chain : timing.alone).median;
  }

  Json Document(const DeviceInfo& info) const {
    Json document = bench::DocumentHead(info, commit_);
    document["file"] = output_;
    document["results"] = Json::array();
    for (const Measured& one : measured_) {
      const bench::BenchCase& bench = one.bench;
      Json row = {{"format", FormatName(bench.spec.format)},
                  {"group_size", bench.spec.group_size},
                  {"activations", DTypeName(bench.activation_type)},
                  {"gated", bench.options.gated},
                  {"m", bench.shape.m},
                  {"n", bench.shape.n},
                  {"k", bench.shape.k},
                  {"fastest", one.fastest == nullptr ? Json() : Json(one.fastest->kernel)},
                  {"kernels", Json::array()}};
      for (const bench::KernelTiming& timing : one.timings) {
        Json kernel = {{"kernel", timing.kernel},
                       {"accuracy", timing.accuracy},
                       {"planned", timing.planned},
                       {"selectable", timing.selectable}};
        kernel.update(bench::TimingJson(timing.alone));
        if (timing.chain) kernel["chain"] = bench::TimingJson(*timing.chain);
        row["kernels"].push_back(std::move(kernel));
      }
      document["results"].push_back(std::move(row));
    }
    return document;
  }

  std::string Text() const {
    Table table({"format", "m", "n", "k", "fastest", "us", "without a table", "us", "gain"});
    for (const Measured& one : measured_) {
      const bench::KernelTiming* const planned = PlannedOf(one);
      if (one.fastest == nullptr || planned == nullptr) continue;
      table.AddRow({std::string(FormatName(one.bench.spec.format)) +
                        (one.bench.options.gated ? ", gated" : ""),
                    FormatInteger(one.bench.shape.m), FormatInteger(one.bench.shape.n),
                    FormatInteger(one.bench.shape.k), one.fastest->kernel,
                    fmt::format("{:.2f}", SecondsOf(*one.fastest) * 1e6), planned->kernel,
                    fmt::format("{:.2f}", SecondsOf(*planned) * 1e6),
                    FormatChange(SecondsOf(*planned) / SecondsOf(*one.fastest) - 1)});
    }
    return table.ToString() + "\nwritten to " + output_ + "\n";
  }

  DeviceArgument device_;
  std::vector<std::string> shapes_;
  std::string model_;
  bool gated_ = false;
  ProductArguments products_;
  std::optional<int64_t> threads_;
  std::string output_;
  std::string commit_;

  bool gpu_ = false;
  std::vector<bench::BenchCase> cases_;
  std::vector<TuningSection> sections_;
  std::vector<Measured> measured_;
};

}  // namespace

std::unique_ptr<Command> Make_tune() { return std::make_unique<TuneCommand>(); }

}  // namespace marlin::cli
