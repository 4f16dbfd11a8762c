// bench: measures the kernels, also as a fraction of this machine's peak.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "backends/cuda/measure/graph_timer.h"
#include "backends/metal/metal_backend.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "base/text_table.h"
#include "bench/baseline_cublas.h"
#include "bench/document.h"
#include "bench/gemm.h"
#include "bench/gpu.h"
#include "bench/gpu_report.h"
#include "bench/load.h"
#include "bench/model.h"
#include "bench/moe.h"
#include "bench/moe_placement.h"
#include "bench/sweep.h"
#include "bench/timed_device.h"
#include "cli/command.h"
#include "cli/device_argument.h"
#include "cli/model_arguments.h"
#include "cli/product_arguments.h"
#include "cli/trace_arguments.h"
#include "ops/device.h"
#include "plan/kernel_desc.h"
#include "plan/kernel_name.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// The weights of a case, but for their shape and their scales.
struct WeightKind {
  Format format = Format::kFp4E2M1;
  Sparsity sparsity = Sparsity::kDense;
};

/// "fp4_e2m1", "fp4_e2m1 2:4".
std::string NameOf(const WeightsSpec& spec) {
  const std::string format(FormatName(spec.format));
  return spec.sparsity == Sparsity::kDense
             ? format
             : fmt::format("{} {}", format, SparsityName(spec.sparsity));
}

class BenchCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("OP", &op_, "gemm, dequantize, sweep, moe, model or load");
    arguments.Positional("MODEL", &model_path_, "model, load: a plain or quantized directory");
    arguments.Model(&model_path_);
    arguments.Option("--shape", &shapes_, "M,N,K",
                     "May be repeated; moe: tokens, inner features, hidden features");
    arguments.Option("--shapes", &shapes_file_, "FILE", "One M,N,K a line; # begins a comment");
    products_.Declare(arguments);
    arguments.Option("--sparsity", &sparsities_, "SPARSITY",
                     "gemm, dequantize, moe: dense (default) or 2:4; may be repeated");
    arguments.Option("--accuracy", &accuracy_, "ACCURACY", "default, exact or w4a8");
    arguments.Flag("--batch-invariant", &batch_invariant_,
                   "gemm, moe: results of a row do not depend on the other rows");
    arguments.Option("--kernel", &kernel_, "NAME",
                     "Forces one kernel, or NAME@WIDTHxSPLITS; all, on a GPU: every variant; "
                     "sweep: all also times the kernels that were not selected");
    arguments.Option("--count", &count_, {.least = 1}, "N", "sweep: random problems; default 50");
    arguments.Option("--seed", &seed_, {.least = 0}, "N", "sweep: default 1");
    arguments.Option("--seconds", &seconds_, {.least = 0, .without_least = true}, "S",
                     "sweep: begins no problem after so many; default: no limit");
    arguments.Option("--experts", &experts_, {1, 4096}, "N", "moe: default 128");
    arguments.Option("--top-k", &top_k_, {1, 4096}, "N", "moe: experts of a token; default 8");
    arguments.Option("--mix", &mix_, "FORMAT", "moe: every second expert has this format");
    arguments.Option("--host-experts", &host_experts_, {0, 4096}, "N",
                     "moe: so many experts, the least frequent, on the CPU; against fetching them");
    arguments.Option("--threads", &threads_, kThreadRange, "N", "Default: all processors");
    device_argument_.Declare(arguments, "auto, cpu, cuda, cuda:N or metal");
    arguments.Option("--against", &against_, "BASELINE",
                     "Dense GEMM baseline of the same run: openblas; on a GPU cublas or torch");
    arguments.Option("--record", &record_, "FILE", "Also writes the document, dated, to FILE");
    arguments.Option("--prompt-tokens", &prompt_tokens_, {.least = 1}, "N",
                     "model: prompt tokens; default 512, less if the context is smaller");
    arguments.Option("--new-tokens", &new_tokens_, {.least = 1}, "N",
                     "model: tokens to generate; default 64");
    arguments.Option("--batch", &batch_, {1, bench::kMaxBatch}, "N",
                     "model: batch size in sequences; default 1");
    arguments.Option("--prepared", &model_open_.prepared, "FILE",
                     "model, load: weights that `prepare` wrote");
    arguments.Flag("--profile", &model_options_.profile,
                   "model: also the time of each operation of a prefill and of a decode step");
    kv_cache_.Declare(arguments, "model: keys and values: f32, bf16 (default) or fp8_e4m3");
    arguments.Option("--commit", &commit_, "HASH", "Recorded with the results");
    trace_.Declare(arguments);
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(CheckOp());
    MARLIN_ASSIGN_OR_RETURN(model_open_.kv_cache, kv_cache_.Type());
    MARLIN_RETURN_IF_ERROR(trace_.Check());
    if (trace_.given()) return ReplayTrace(console);
    MARLIN_ASSIGN_OR_RETURN(device_, device_argument_.Name());
    MARLIN_RETURN_IF_ERROR(bench::CheckTimed(device_));
    // One pool for the device and the probes: two would spin against each other.
    ThreadPool pool(static_cast<int>(threads_.value_or(0)));
    DeviceOptions options;
    options.threads = pool.worker_count();
    options.parallel_for = [&pool](int64_t count, const std::function<void(int64_t)>& body) {
      pool.Run(count, [&body](int64_t i, int) { body(i); });
    };
    MARLIN_ASSIGN_OR_RETURN(Device device, OpenDevice(options));
    MARLIN_RETURN_IF_ERROR(CheckKernel(device).WithContext("--kernel"));
    if (op_ == "load") return RunLoad(console, device);
    if (op_ == "moe" && host_experts_) return RunPlacements(console, device, options);
    std::optional<Model> model;
    if (op_ == "model") {
      MARLIN_ASSIGN_OR_RETURN(model, OpenModel(device));
      device = model->device();
      device_argument_.SayTaken(console, device.info());
    }
    const DeviceInfo info = device.info();
    if (op_ == "sweep" && info.backend != "cpu") {
      return Status(Code::kUnsupported, "bench sweep: only on a CPU, got " + device_);
    }
    if (info.backend == "cuda") return RunOnGpu(console, device, model);
    const Backend& backend = device.impl().backend();
    if (info.backend == "metal") {
      if (!against_.empty()) return Status(Code::kUnsupported, "bench: no baselines on " + device_);
      MARLIN_ASSIGN_OR_RETURN(metal::GpuRoofline roofline,
                              metal::GpuRoofline::Make(metal::DriverOf(backend)));
      MARLIN_ASSIGN_OR_RETURN(ceilings_, bench::MeasureCeilings(roofline));
      return RunOnSharedMemory(console, device, bench::ProbeOf(roofline), model);
    }
    MARLIN_ASSIGN_OR_RETURN(cpu::Roofline roofline,
                            cpu::Roofline::Make(backend.Properties().level, pool));
    ceilings_ = bench::MeasureCeilings(roofline);
    if (op_ == "sweep") return RunSweep(console, device, bench::ProbeOf(roofline));
    return RunOnSharedMemory(console, device, bench::ProbeOf(roofline), model);
  }

 private:
  /// Opens the device and reads the options of GEMMs, which depend on it. They are read before a
  /// named device is opened, so that their errors come first.
  Result<Device> OpenDevice(const DeviceOptions& options) {
    std::optional<Device> device;
    if (device_ == "auto") {
      MARLIN_ASSIGN_OR_RETURN(device, device_argument_.Open(options));
      device_ = device->info().name;
    }
    if (!OfModels()) MARLIN_RETURN_IF_ERROR(ReadArguments());
    return device ? Result<Device>(*device) : device_argument_.Open(options);
  }

  Status Report(Console& console, const Json& document, const std::string& text) const {
    if (!record_.empty()) MARLIN_RETURN_IF_ERROR(WriteRecord(document));
    return console.json() ? console.PrintJson(document) : console.Print(text);
  }

  bool OfModels() const { return op_ == "model" || op_ == "load"; }

  Status RunLoad(Console& console, const Device& device) const {
    MARLIN_ASSIGN_OR_RETURN(const bench::LoadBench bench,
                            bench::BenchLoad(*model_path_, device, model_open_));
    device_argument_.SayTaken(console, bench.device);
    Json document = bench::DocumentHead(bench.device, commit_);
    document["results"] = Json::array({bench.ToJson()});
    return Report(console, document, bench.ToText());
  }

  /// Checks the op, that a model op has a model, and options that belong to other ops.
  Status CheckOp() const {
    const auto refuse = [](std::string_view message) {
      return Status(Code::kInvalidArgument, message);
    };
    if (op_ == "sparse") {
      return Status(Code::kUnsupported, "bench sparse: this version has no such op");
    }
    if (op_ != "gemm" && op_ != "dequantize" && op_ != "sweep" && op_ != "moe" && !OfModels()) {
      return refuse(fmt::format(
          "bench: expected gemm, dequantize, sweep, moe, model or load, got '{}'", op_));
    }
    const bool model = OfModels();
    if (model_path_.has_value() != model) {
      return refuse(fmt::format("bench {}: expected {} directory, got {}", op_,
                                model ? "one" : "no", model ? "none" : *model_path_));
    }
    struct OptionOfOps {
      const char* name;
      bool given;
      std::string_view ops;
    };
    constexpr std::string_view kKernels = "gemm dequantize";
    constexpr std::string_view kShapes = "gemm dequantize moe";
    const OptionOfOps options[] = {
        {"--shape", !shapes_.empty(), kShapes},
        {"--shapes", !shapes_file_.empty(), kShapes},
        {"--sparsity", !sparsities_.empty(), kShapes},
        {"--kernel", !kernel_.empty(), "gemm dequantize sweep"},
        {"--count", count_.has_value(), "sweep"},
        {"--seed", seed_.has_value(), "sweep"},
        {"--seconds", seconds_.has_value(), "sweep"},
        {"--against", !against_.empty(), kKernels},
        {products_.Given(), products_.Given() != nullptr, kShapes},
        {"--experts", experts_.has_value(), "moe"},
        {"--top-k", top_k_.has_value(), "moe"},
        {"--mix", !mix_.empty(), "moe"},
        {"--host-experts", host_experts_.has_value(), "moe model"},
        {"--trace", trace_.given(), "moe"},
        {"--prompt-tokens", prompt_tokens_.has_value(), "model"},
        {"--new-tokens", new_tokens_.has_value(), "model"},
        {"--batch", batch_.has_value(), "model"},
        {"--prepared", !model_open_.prepared.empty(), "model load"},
        {"--kv-cache", kv_cache_.given(), "model"},
        {"--profile", model_options_.profile, "model"},
    };
    for (const OptionOfOps& option : options) {
      if (option.given && option.ops.find(op_) == std::string_view::npos) {
        return refuse(fmt::format("bench {}: has no {}", op_, option.name));
      }
    }
    if (op_ == "moe" && top_k_.value_or(8) > experts_.value_or(128)) {
      return refuse(fmt::format("--top-k: expected 1..{} (experts), got {}", experts_.value_or(128),
                                top_k_.value_or(8)));
    }
    if (op_ == "moe" && host_experts_.value_or(0) > experts_.value_or(128)) {
      return refuse(fmt::format("--host-experts: expected 0..{} (experts), got {}",
                                experts_.value_or(128), *host_experts_));
    }
    if (!mix_.empty() && (host_experts_ || trace_.given())) {
      return refuse("--mix: not with --host-experts or --trace");
    }
    if (!sparsities_.empty() && trace_.given()) return refuse("--sparsity: not with --trace");
    if (host_experts_ && trace_.given()) return refuse("--trace: not with --host-experts");
    return {};
  }

  /// Refuses a kernel that the device lacks or that cannot run a case, before the machine is
  /// measured and weights beyond the caches are made: it plans with a single matrix.
  Status CheckKernel(const Device& device) const {
    const DeviceInfo info = device.info();
    const bool several = kernel_ == "all" && (op_ == "sweep" || info.backend == "cuda");
    if (kernel_.empty() || several) return {};
    MARLIN_ASSIGN_OR_RETURN(const KernelName name, ParseKernelName(kernel_));
    const auto found =
        std::find_if(info.kernels.begin(), info.kernels.end(),
                     [&](const KernelInfo& kernel) { return kernel.name == name.kernel; });
    if (found == info.kernels.end()) {
      std::string known;
      for (const KernelInfo& kernel : info.kernels) {
        if (kernel.available) known += (known.empty() ? "" : ", ") + kernel.name;
      }
      return Status(Code::kInvalidArgument, fmt::format("unknown name '{}' on {}; known: {}",
                                                        Printable(name.kernel), info.name, known));
    }
    if (op_ != "gemm") return {};
    for (const WeightKind& kind : kinds_) {
      for (const bench::GemmShape& shape : parsed_shapes_) {
        const bench::BenchCase bench = MakeCase(kind, shape, 0);
        MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, bench::RandomWeights(bench.spec));
        MARLIN_ASSIGN_OR_RETURN(
            const PreparedWeights ready,
            Prepare(weights, device, {.marlin_w4 = kernel_ == "marlin_gemm_w4"}));
        GemmProblem problem;
        problem.m = shape.m;
        problem.a_type = problem.out_type = bench.activation_type;
        problem.accuracy = bench.options.accuracy;
        problem.determinism = bench.options.determinism;
        problem.allow_bf16_activations = bench.options.allow_bf16_activations;
        problem.kernel = kernel_;
        MARLIN_RETURN_IF_ERROR(PlanGemm(device, problem, ready).status());
      }
    }
    return {};
  }

  /// Runs on the CPU, or on a GPU that shares the host's memory.
  Status RunOnSharedMemory(Console& console, const Device& device, const bench::ReadProbe& probe,
                           const std::optional<Model>& model) {
    const DeviceInfo info = device.info();
    if (op_ == "moe") {
      return RunMoeCases(console, device, bench::kBeyondCacheBytes, [&](const bench::MoeCase& moe) {
        return bench::RunMoe(device, moe, probe);
      });
    }
    MARLIN_RETURN_IF_ERROR(model ? RunModel(*model) : RunCases(console, device, probe));
    return Report(console, Document(info), Heading(info) + (op_ == "model" ? ModelText() : Text()));
  }

  /// Opens the model before the machine is measured, so that errors come early.
  Result<Model> OpenModel(const Device& device) {
    model_open_.batch_invariant = batch_invariant_;
    model_open_.host_experts = host_experts_.value_or(0);
    MARLIN_ASSIGN_OR_RETURN(Model model, Model::Open(*model_path_, device, model_open_));
    model_ = model.info();
    bench::ModelBenchOptions& options = model_options_;
    options.prompt_tokens =
        prompt_tokens_.value_or(std::min(options.prompt_tokens, model_.max_positions / 2));
    options.new_tokens = new_tokens_.value_or(
        std::min(options.new_tokens, model_.max_positions - options.prompt_tokens));
    options.batch = batch_.value_or(options.batch);
    MARLIN_RETURN_IF_ERROR(bench::CheckModelBench(model_, options));
    return model;
  }

  Status RunModel(const Model& model) {
    MARLIN_ASSIGN_OR_RETURN(phases_, bench::BenchModel(model, model_options_));
    return {};
  }

  Status RunCases(Console& console, const Device& device, const bench::ReadProbe& probe) {
    std::optional<bench::OpenBlas> blas;
    if (!against_.empty()) {
      MARLIN_ASSIGN_OR_RETURN(blas, bench::OpenBlas::Load(device.info().threads));
    }
    return ForEachCase(
        console, device, bench::kBeyondCacheBytes, [&](const bench::BenchCase& bench) -> Status {
          MARLIN_ASSIGN_OR_RETURN(
              bench::BenchResult result,
              bench::RunBench(device, prepared_, bench, probe, blas ? &*blas : nullptr));
          result.prepare_rate = prepare_rate_;
          results_.push_back(std::move(result));
          return Status();
        });
  }

  Status RunSweep(Console& console, const Device& device, const bench::ReadProbe& probe) {
    bench::SweepOptions options;
    options.count = count_.value_or(options.count);
    options.seed = seed_.value_or(options.seed);
    options.seconds = seconds_.value_or(options.seconds);
    options.others = kernel_ == "all";
    options.gemm = MakeCase({}, {}, 0).options;
    if (options.others) options.gemm.kernel.clear();
    MARLIN_ASSIGN_OR_RETURN(
        const bench::Sweep sweep,
        bench::Sweep::Run(device, probe, ceilings_, options,
                          [&](const std::string& text) { console.Message(text); }));
    const DeviceInfo info = device.info();
    Json document = Document(info);
    document.update(sweep.ToJson());
    return Report(console, document, Heading(info) + sweep.ToText());
  }

  Status RunMoeCases(Console& console, const Device& device, int64_t weight_bytes,
                     const std::function<Result<bench::MoeResult>(const bench::MoeCase&)>& run) {
    std::vector<bench::MoeResult> results;
    MARLIN_RETURN_IF_ERROR(
        ForEachCase(console, device, weight_bytes, [&](const bench::BenchCase& bench) -> Status {
          bench::MoeCase moe = MoeOf(bench);
          if (!mix_.empty()) {
            MARLIN_ASSIGN_OR_RETURN(const Format format, ParseFormat(mix_));
            moe.mixed = MakeCase({format, Sparsity::kDense}, bench.shape, weight_bytes).spec;
          }
          MARLIN_ASSIGN_OR_RETURN(bench::MoeResult result, run(moe));
          results.push_back(std::move(result));
          return Status();
        }));
    const DeviceInfo info = device.info();
    Json document = Document(info);
    for (const bench::MoeResult& result : results) {
      document["results"].push_back(result.ToJson(ceilings_));
    }
    return Report(console, document, Heading(info) + bench::MoeText(results, ceilings_));
  }

  /// Times placed experts. The host's side is the device itself if that is a CPU.
  Status RunPlacements(Console& console, const Device& device, const DeviceOptions& options) {
    const DeviceInfo info = device.info();
    std::optional<Device> host = device;
    if (info.backend != "cpu") {
      MARLIN_ASSIGN_OR_RETURN(host, Device::Open("cpu", options));
    }
    std::vector<bench::PlacementResult> results;
    MARLIN_RETURN_IF_ERROR(ForEachCase(
        console, device, bench::kBeyondCacheBytes, [&](const bench::BenchCase& bench) -> Status {
          MARLIN_ASSIGN_OR_RETURN(bench::PlacementResult result,
                                  bench::RunPlacement(device, *host, MoeOf(bench), *host_experts_));
          results.push_back(std::move(result));
          return Status();
        }));
    Json document = bench::DocumentHead(info, commit_);
    document["host"] = bench::DocumentHead(host->info(), "")["device"];
    document["results"] = Json::array();
    for (const bench::PlacementResult& result : results) {
      document["results"].push_back(result.ToJson());
    }
    return Report(console, document,
                  fmt::format("{}, host {}\n\n{}", DescribeDevice(info),
                              DescribeDevice(host->info()), bench::PlacementText(results)));
  }

  /// Replays a trace of routing, which needs no device.
  Status ReplayTrace(Console& console) {
    if (shapes_.size() != 1 || !shapes_file_.empty()) {
      return Status(Code::kInvalidArgument,
                    "--trace: expected one --shape, for the size of the experts");
    }
    MARLIN_RETURN_IF_ERROR(ReadArguments());
    std::vector<bench::TraceExperts> experts;
    for (const Format format : products_.formats()) {
      const bench::MoeCase moe =
          MoeOf(MakeCase({format, Sparsity::kDense}, parsed_shapes_.front(), 0));
      experts.push_back({format, static_cast<int64_t>(moe.ExpertBytes())});
    }
    MARLIN_ASSIGN_OR_RETURN(const std::vector<bench::TraceReplay> replays, trace_.Replay(experts));
    Json document = {{"results", Json::array()}};
    for (const bench::TraceReplay& replay : replays) {
      document["results"].push_back(replay.ToJson());
    }
    return Report(console, document, bench::TraceText(replays));
  }

  /// The layers that together have the matrices of a case, three for every expert.
  bench::MoeCase MoeOf(const bench::BenchCase& bench) const {
    bench::MoeCase moe;
    moe.gemm = bench;
    moe.experts = experts_.value_or(moe.experts);
    moe.top_k = top_k_.value_or(moe.top_k);
    moe.layers = CeilDivide(bench.spec.experts, 3 * moe.experts);
    return moe;
  }

  Status RunOnGpu(Console& console, const Device& device, const std::optional<Model>& model) {
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<cuda::GraphTimer> timer,
                            cuda::OpenGraphTimer(device_));
    // Loaded even without --against: its largest GEMM is the compute ceiling.
    const Result<bench::CublasBaseline> cublas = bench::LoadCublas(device);
    if (!against_.empty()) MARLIN_RETURN_IF_ERROR(cublas.status().WithContext("--against"));
    bench::GpuBench gpu(device, *timer, cublas.ok() ? &cublas->baseline : nullptr);
    MARLIN_ASSIGN_OR_RETURN(const bench::GpuCeilings ceilings, gpu.MeasureCeilings());
    ceilings_.read = std::max(ceilings.read_bulk, ceilings.read_loads);
    ceilings_.bf16 = ceilings.tensor;
    if (model) {
      MARLIN_RETURN_IF_ERROR(RunModel(*model));
      const DeviceInfo info = device.info();
      return Report(console, Document(info), Heading(info) + ModelText());
    }
    if (op_ == "moe") {
      return RunMoeCases(console, device, bench::kBeyondL2Bytes, [&](const bench::MoeCase& moe) {
        return bench::RunMoeOnGpu(device, moe, *timer, ceilings_.read);
      });
    }
    std::vector<bench::GpuBenchResult> results;
    MARLIN_RETURN_IF_ERROR(ForEachCase(
        console, device, bench::kBeyondL2Bytes, [&](const bench::BenchCase& bench) -> Status {
          MARLIN_ASSIGN_OR_RETURN(bench::GpuBenchResult result,
                                  gpu.Run(prepared_, bench, !against_.empty()));
          result.prepare_rate = prepare_rate_;
          results.push_back(std::move(result));
          return Status();
        }));
    const DeviceInfo info = device.info();
    const std::string version = cublas.ok() ? cublas->version : "";
    Json document = bench::DocumentHead(info, commit_);
    document.update(bench::GpuDocument(ceilings, version, results));
    return Report(console, document, bench::GpuText(info, ceilings, version, results));
  }

  /// Calls run(case) for all formats and shapes, with the case's weights in prepared_.
  Status ForEachCase(Console& console, const Device& device, int64_t weight_bytes,
                     const std::function<Status(const bench::BenchCase&)>& run) {
    for (const WeightKind& kind : kinds_) {
      for (const bench::GemmShape& shape : parsed_shapes_) {
        const bench::BenchCase bench = MakeCase(kind, shape, weight_bytes);
        console.Message(fmt::format("{} {} m={} n={} k={}", op_, NameOf(bench.spec), shape.m,
                                    shape.n, shape.k));
        if (op_ != "moe") MARLIN_RETURN_IF_ERROR(PrepareWeights(device, bench.spec));
        MARLIN_RETURN_IF_ERROR(run(bench));
      }
    }
    return {};
  }

  Status ReadArguments() {
    const bool gpu = device_.starts_with("cuda");
    for (const std::string& baseline : against_) {
      // PyTorch's bf16 matmul is cuBLAS's.
      if (gpu ? baseline != "cublas" && baseline != "torch" : baseline != "openblas") {
        return Status(Code::kInvalidArgument,
                      fmt::format("--against: unknown baseline '{}' on {}; known: {}", baseline,
                                  device_, gpu ? "cublas, torch" : "openblas"));
      }
    }
    MARLIN_RETURN_IF_ERROR(ReadShapes());
    MARLIN_RETURN_IF_ERROR(products_.Read());
    MARLIN_RETURN_IF_ERROR(ReadSparsities());
    if (accuracy_ != "default" && accuracy_ != "exact" && accuracy_ != "w4a8") {
      return Status(
          Code::kInvalidArgument,
          fmt::format("--accuracy: expected default, exact or w4a8, got '{}'", accuracy_));
    }
    return CheckSizes();
  }

  Status ReadSparsities() {
    const std::vector<std::string> names =
        sparsities_.empty() ? std::vector<std::string>{"dense"} : sparsities_;
    for (const Format format : products_.formats()) {
      for (const std::string& name : names) {
        const Result<Sparsity> sparsity = ParseSparsity(name);
        if (!sparsity.ok()) return sparsity.status().WithContext("--sparsity");
        kinds_.push_back({format, *sparsity});
      }
    }
    return {};
  }

  Status ReadShapes() {
    if (!shapes_file_.empty()) {
      const size_t given = shapes_.size();
      constexpr int64_t kMostBytes = int64_t{1} << 20;
      MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadFile(shapes_file_, kMostBytes));
      std::istringstream lines(text);
      for (std::string line; std::getline(lines, line);) {
        line.resize(std::min(line.find('#'), line.size()));
        std::istringstream words(line);
        for (std::string word; words >> word;) shapes_.push_back(word);
      }
      if (shapes_.size() == given) {
        return Status(
            Code::kInvalidArgument,
            fmt::format("--shapes: {}: expected at least one M,N,K, got none", shapes_file_));
      }
    }
    if (shapes_.empty()) {
      shapes_ = {"1,4096,4096", "4,4096,4096", "16,4096,4096", "64,4096,4096", "512,4096,4096"};
    }
    for (const std::string& text : shapes_) {
      MARLIN_ASSIGN_OR_RETURN(const bench::GemmShape shape, ParseShape(text));
      parsed_shapes_.push_back(shape);
    }
    return Status();
  }

  /// Checks sizes before the machine is measured, which takes seconds.
  Status CheckSizes() const {
    const int64_t bytes =
        device_.starts_with("cuda") ? bench::kBeyondL2Bytes : bench::kBeyondCacheBytes;
    const bool blas = std::find(against_.begin(), against_.end(), "openblas") != against_.end();
    for (const bench::GemmShape& shape : parsed_shapes_) {
      for (const WeightKind& kind : kinds_) {
        MARLIN_RETURN_IF_ERROR(CheckCaseFits(MakeCase(kind, shape, bytes)));
      }
      if (blas) MARLIN_RETURN_IF_ERROR(bench::OpenBlas::CheckSizes(shape.m, shape.n, shape.k));
    }
    return Status();
  }

  bench::BenchCase MakeCase(const WeightKind& kind, const bench::GemmShape& shape,
                            int64_t weight_bytes) const {
    bench::BenchCase bench = products_.MakeCase(kind.format, shape, weight_bytes);
    bench.spec.sparsity = kind.sparsity;
    bench.op = op_;
    bench.options.kernel = kernel_;
    bench.options.accuracy = accuracy_ == "exact"  ? Accuracy::kExact
                             : accuracy_ == "w4a8" ? Accuracy::kW4A8
                                                   : Accuracy::kDefault;
    bench.options.determinism =
        batch_invariant_ ? Determinism::kBatchInvariant : Determinism::kDefault;
    return bench;
  }

  /// Cases with the same weights share them.
  Status PrepareWeights(const Device& device, const WeightsSpec& spec) {
    if (prepared_.storage() != nullptr && prepared_.spec() == spec) return Status();
    prepared_ = PreparedWeights();
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, bench::RandomWeights(spec));
    const bench::Stopwatch stopwatch;
    MARLIN_ASSIGN_OR_RETURN(prepared_,
                            Prepare(weights, device, {.marlin_w4 = kernel_ == "marlin_gemm_w4"}));
    MARLIN_RETURN_IF_ERROR(device.Synchronize());
    prepare_rate_ = static_cast<double>(prepared_.bytes()) / stopwatch.Seconds();
    return Status();
  }

  /// The roofline time of a model phase over its measured time: weights read once, and the
  /// arithmetic of its GEMMs.
  double Fraction(const bench::ModelPhase& phase) const {
    const double peak = std::max(ceilings_.bf16, ceilings_.fp32);
    return std::max(phase.weight_bytes / ceilings_.read, phase.operations / peak) /
           phase.timing.median;
  }

  /// Bandwidth relative to the read probe of the same run.
  double ProbeFraction(const bench::BenchResult& result) const {
    return result.weight_bytes / result.timing.median / result.probe_rate;
  }

  Json Document(const DeviceInfo& info) const {
    Json document = bench::DocumentHead(info, commit_);
    for (const auto& [name, value] : ceilings_.figures) document["roofline"][name] = value;
    document["results"] = Json::array();
    for (const bench::BenchResult& result : results_)
      document["results"].push_back(ResultJson(result));
    if (op_ != "model") return document;
    document["model"] = {{"path", *model_path_},
                         {"model_type", model_.model_type},
                         {"recipe", model_.recipe},
                         {"parameters", model_.parameters},
                         {"bytes", model_.bytes},
                         {"bits_per_weight", model_.bits_per_weight},
                         {"prompt_tokens", model_options_.prompt_tokens},
                         {"new_tokens", model_options_.new_tokens},
                         {"batch_invariant", batch_invariant_},
                         {"kv_cache", KvCacheTypeName(model_.kv_cache)},
                         {"batch", model_options_.batch}};
    for (const bench::ModelPhase& phase : phases_) document["results"].push_back(PhaseJson(phase));
    return document;
  }

  Json PhaseJson(const bench::ModelPhase& phase) const {
    Json row = {{"op", "model"}, {"phase", phase.name}, {"tokens", phase.tokens}};
    row.update(bench::TimingJson(phase.timing));
    row["tokens_per_second"] = phase.TokensPerSecond();
    row["gbps"] = phase.weight_bytes / phase.timing.median * 1e-9;
    row["tflops"] = phase.operations / phase.timing.median * 1e-12;
    row["roofline_fraction"] = Fraction(phase);
    row["products_seconds"] = phase.products.median;
    row["products_fraction"] = phase.ProductsFraction();
    if (model_options_.profile) row["profile"] = bench::ProfileJson(phase);
    return row;
  }

  Json ResultJson(const bench::BenchResult& result) const {
    const bench::GemmShape& shape = result.bench.shape;
    Json row = {{"op", op_},
                {"kernel", result.kernel},
                {"accuracy", result.accuracy},
                {"batch_invariant", batch_invariant_},
                {"format", FormatName(result.bench.spec.format)},
                {"sparsity", SparsityName(result.bench.spec.sparsity)},
                {"group_size", result.bench.spec.group_size},
                {"scale_type", ScaleTypeName(result.bench.spec.scale_type)},
                {"activations", DTypeName(result.bench.activation_type)},
                {"m", shape.m},
                {"n", shape.n},
                {"k", shape.k}};
    row.update(bench::TimingJson(result.timing));
    row["gbps"] = result.weight_bytes / result.timing.median * 1e-9;
    row["tflops"] = result.operations / result.timing.median * 1e-12;
    row["roofline_fraction"] = bench::RooflineFraction(result, ceilings_);
    row["read_probe_fraction"] = ProbeFraction(result);
    row["prepare_gbps"] = result.prepare_rate * 1e-9;
    for (const bench::BaselineTiming& baseline : result.baselines) {
      Json entry = {{"name", baseline.name}};
      entry.update(bench::TimingJson(baseline.timing));
      entry["speedup"] = baseline.timing.median / result.timing.median;
      row["peers"].push_back(std::move(entry));
    }
    return row;
  }

  std::string ModelText() const {
    Table table({"phase", "tokens", "ms", "10 to 90 %", "tokens/s", "GB/s", "GFLOP/s", "roofline",
                 "products alone"});
    for (const bench::ModelPhase& phase : phases_) {
      table.AddRow({phase.name, std::to_string(phase.tokens),
                    fmt::format("{:.3f}", 1e3 * phase.timing.median),
                    fmt::format("{:.3f} to {:.3f}", 1e3 * phase.timing.p10, 1e3 * phase.timing.p90),
                    fmt::format("{:.1f}", phase.TokensPerSecond()),
                    fmt::format("{:.1f}", phase.weight_bytes / phase.timing.median * 1e-9),
                    fmt::format("{:.0f}", phase.operations / phase.timing.median * 1e-9),
                    fmt::format("{:.0f} %", 100 * Fraction(phase)),
                    fmt::format("{:.0f} %", 100 * phase.ProductsFraction())});
    }
    const std::string profile = model_options_.profile ? bench::ProfileText(phases_) : "";
    return fmt::format(
        "{}: {} ({}), {} parameters, {}; {} sequences, {} tokens read, then {} written\n\n{}{}",
        *model_path_, model_.model_type, model_.recipe.empty() ? "plain" : model_.recipe,
        FormatCount(model_.parameters), FormatBytes(model_.bytes), model_options_.batch,
        model_options_.prompt_tokens, model_options_.new_tokens, table.ToString(), profile);
  }

  std::string Heading(const DeviceInfo& info) const {
    const std::string threads =
        info.backend == "cpu" ? fmt::format(", {} threads", info.threads) : "";
    return fmt::format("{}{}: {}\n\n", info.model, threads, ceilings_.text);
  }

  std::string Text() const {
    std::vector<std::string> header = {"format", "m",    "n",       "k",        "kernel",
                                       "ms",     "GB/s", "GFLOP/s", "roofline", "probe"};
    for (const bench::BaselineTiming& baseline : results_.front().baselines)
      header.push_back("vs " + baseline.name);
    Table table(header);
    for (const bench::BenchResult& r : results_) {
      std::vector<std::string> cells = {
          NameOf(r.bench.spec),
          std::to_string(r.bench.shape.m),
          std::to_string(r.bench.shape.n),
          std::to_string(r.bench.shape.k),
          r.kernel,
          fmt::format("{:.3f}", r.timing.median * 1e3),
          fmt::format("{:.1f}", r.weight_bytes / r.timing.median * 1e-9),
          fmt::format("{:.0f}", r.operations / r.timing.median * 1e-9),
          fmt::format("{:.0f} %", 100 * bench::RooflineFraction(r, ceilings_)),
          fmt::format("{:.0f} %", 100 * ProbeFraction(r))};
      for (const bench::BaselineTiming& baseline : r.baselines) {
        cells.push_back(fmt::format("{:.2f}x", baseline.timing.median / r.timing.median));
      }
      table.AddRow(std::move(cells));
    }
    return table.ToString();
  }

  Status WriteRecord(const Json& document) const {
    std::ofstream file(record_, std::ios::trunc);
    file << document.dump(1) << "\n";
    file.close();
    if (!file) return Status(Code::kIo, record_ + ": cannot be written");
    return Status();
  }

  std::string op_;
  std::vector<std::string> shapes_;
  std::string shapes_file_;
  ProductArguments products_;
  std::vector<std::string> sparsities_;
  std::vector<WeightKind> kinds_;  ///< Formats by sparsities.
  std::string accuracy_ = "default";
  bool batch_invariant_ = false;
  std::string kernel_;
  std::optional<int64_t> count_;
  std::optional<int64_t> seed_;
  std::optional<double> seconds_;
  std::optional<int64_t> experts_;
  std::optional<int64_t> top_k_;
  std::string mix_;
  std::optional<int64_t> host_experts_;
  std::optional<int64_t> threads_;
  TraceArguments trace_;
  DeviceArgument device_argument_;
  std::string device_;  ///< The name as given; of "auto" the device that was opened.
  std::vector<std::string> against_;
  std::string record_;
  std::string commit_;
  std::optional<std::string> model_path_;
  std::optional<int64_t> prompt_tokens_;
  std::optional<int64_t> new_tokens_;
  std::optional<int64_t> batch_;

  std::vector<bench::GemmShape> parsed_shapes_;
  PreparedWeights prepared_;
  double prepare_rate_ = 0;  ///< Bytes per second.
  bench::MachineCeilings ceilings_;
  std::vector<bench::BenchResult> results_;
  ModelInfo model_;
  ModelOptions model_open_;
  KvCacheArgument kv_cache_;
  bench::ModelBenchOptions model_options_;
  std::vector<bench::ModelPhase> phases_;
};

}  // namespace

std::unique_ptr<Command> Make_bench() { return std::make_unique<BenchCommand>(); }

}  // namespace marlin::cli
