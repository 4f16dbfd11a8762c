// bench model: prefill and generation of a model.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/errors.h"
#include "base/macros.h"
#include "base/text_table.h"
#include "bench/model.h"
#include "bench/speculation.h"
#include "cli/arguments/draft_arguments.h"
#include "cli/arguments/model_arguments.h"
#include "cli/arguments/product_arguments.h"
#include "cli/bench/machine.h"
#include "cli/checkpoint_listing.h"
#include "cli/command.h"
#include "cli/progress_bar.h"
#include "text/documents.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Numbers in lists: "128,512", or the option given several times. Errors: kInvalidArgument naming
/// the option.
Result<std::vector<int64_t>> ReadNumbers(const char* option, const std::vector<std::string>& lists,
                                         const WholeRange& range) {
  std::vector<int64_t> numbers;
  for (const std::string& list : lists) {
    for (const std::string& text : SplitList(list)) {
      MARLIN_ASSIGN_OR_RETURN(numbers.emplace_back(), ParseOption(option, text, range));
    }
  }
  return numbers;
}

class BenchModelCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("MODEL", &path_, "A plain or quantized model directory");
    arguments.Model(&path_);
    arguments.Option("-p,--prompt-tokens", &prompts_, "N,...",
                     "Tokens of the prompt; default 512, less if the context is smaller; 0: none");
    arguments.Option("-n,--new-tokens", &news_, "N,...",
                     "Tokens to generate after each prompt; default 64; 0: none");
    arguments.Option("--batch", &batches_, "N,...", "Batch size in sequences; default 1");
    arguments.Option("--prepared", &open_.prepared, "FILE", "Weights that `prepare` wrote");
    gpu_layers_.Declare(arguments);
    arguments.Option("--gpu-memory", &gpu_memory_, "SIZE",
                     "Memory of a GPU for weights and KV cache; default: what is free");
    arguments.Option("--host-experts", &host_experts_, {0, 4096}, "N",
                     "Experts of every layer that run on the CPU");
    arguments.Flag("--batch-invariant", &open_.batch_invariant,
                   "Results of a row do not depend on the other rows");
    kv_cache_.Declare(arguments, "Keys and values: f32, bf16 (default) or fp8_e4m3");
    arguments.Flag("--profile", &profile_,
                   "Also the time of each operation of a prefill and of a decode step");
    arguments.Group("Speculation");
    draft_.Declare(arguments);
    arguments.Option("--tokens", &tokens_, "FILE",
                     "With --speculate: token ids that begin with the prompt; default: sixteen "
                     "tokens, repeated");
    common_.Declare(arguments);
  }

  Status Check(const Console& /*console*/) const override {
    MARLIN_RETURN_IF_ERROR(draft_.Check());
    return tokens_ && !draft_.given() ? Invalid("--tokens: only with --speculate") : Status();
  }

  Status Run(Console& console) override {
    MARLIN_RETURN_IF_ERROR(ReadLists());
    MARLIN_ASSIGN_OR_RETURN(open_.kv_cache, kv_cache_.Type());
    open_.host_experts = host_experts_.value_or(0);
    MARLIN_ASSIGN_OR_RETURN(open_.gpu_layers, gpu_layers_.Count());
    if (gpu_memory_) {
      MARLIN_ASSIGN_OR_RETURN(open_.device_memory, ParseByteSize("--gpu-memory", *gpu_memory_));
    }
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Find(common_));
    MARLIN_RETURN_IF_ERROR(device->Open());
    open_.draft = draft_.source() == DraftSource::kLayer;
    // Opened before the machine is measured, so that errors come early.
    MARLIN_ASSIGN_OR_RETURN(const Model model, Model::Open(path_, device->device(), open_));
    info_ = model.info();
    MARLIN_ASSIGN_OR_RETURN(const SpeculationOptions speculation, OpenDraft(model));
    MARLIN_ASSIGN_OR_RETURN(const std::vector<bench::ModelBenchOptions> runs, ListRuns());
    common_.device.SayTaken(console, model.device().info());
    MARLIN_ASSIGN_OR_RETURN(layers_, DescribeLayers(model));
    ProgressBar bar(console, "bench model");
    const auto total = static_cast<int64_t>(runs.size());
    bar.Update(0, total, "measuring this machine");
    MARLIN_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                            Machine::Measure(*device, model.device()));
    std::vector<bench::ModelPhase> phases;
    for (int64_t done = 0; done < total; ++done) {
      const bench::ModelBenchOptions& run = runs[static_cast<size_t>(done)];
      bar.Update(done, total, fmt::format("pp{}, batch {}", run.prompt_tokens, run.batch));
      MARLIN_ASSIGN_OR_RETURN(const std::vector<bench::ModelPhase> measured,
                              bench::BenchModel(model, run));
      phases.insert(phases.end(), measured.begin(), measured.end());
    }
    MARLIN_RETURN_IF_ERROR(Speculate(model, speculation, &bar));
    bar.Clear();
    return common_.Report(console, Document(*machine, phases), Text(*machine, phases));
  }

 private:
  Result<SpeculationOptions> OpenDraft(const Model& model) const {
    ModelOptions options;
    options.batch_invariant = open_.batch_invariant;
    return draft_.Options(model, nullptr, [&](const std::string& path) {
      return Model::Open(path, model.device(), options);
    });
  }

  /// The prompt of a run with speculation.
  Result<std::vector<int32_t>> Prompt(int64_t tokens) const {
    if (!tokens_) return bench::RepetitivePrompt(tokens, info_.vocab_size);
    MARLIN_ASSIGN_OR_RETURN(std::vector<int32_t> text, ReadTokens(*tokens_));
    if (std::ssize(text) < tokens) {
      return Invalid(fmt::format("--tokens: expected the {} tokens of the prompt or more, got {}",
                                 tokens, text.size()));
    }
    text.resize(static_cast<size_t>(tokens));
    return text;
  }

  /// With a prompt of one token where none is asked for.
  Status Speculate(const Model& model, const SpeculationOptions& speculation, ProgressBar* bar) {
    if (!draft_.given()) return {};
    for (const int64_t batch : batch_) {
      for (const int64_t prompt : prompt_tokens_) {
        for (const int64_t new_tokens : new_tokens_) {
          bench::SpeculationBenchOptions options{.new_tokens = new_tokens,
                                                 .batch = batch,
                                                 .speculation = speculation,
                                                 .draft = draft_.name(),
                                                 .timing = common_.Timing()};
          MARLIN_ASSIGN_OR_RETURN(options.prompt, Prompt(std::max<int64_t>(prompt, 1)));
          bar->Update(0, 1, fmt::format("speculation, pp{}, batch {}", prompt, batch));
          MARLIN_ASSIGN_OR_RETURN(speculated_.emplace_back(),
                                  bench::BenchSpeculation(model, options));
        }
      }
    }
    return {};
  }

  Status ReadLists() {
    MARLIN_ASSIGN_OR_RETURN(prompt_tokens_, ReadNumbers("--prompt-tokens", prompts_, {.least = 0}));
    MARLIN_ASSIGN_OR_RETURN(new_tokens_, ReadNumbers("--new-tokens", news_, {.least = 0}));
    MARLIN_ASSIGN_OR_RETURN(batch_, ReadNumbers("--batch", batches_, {1, bench::kMaxBatch}));
    if (batch_.empty()) batch_ = {1};
    return {};
  }

  /// One run for every batch size and prompt. Errors: as CheckModelBench.
  Result<std::vector<bench::ModelBenchOptions>> ListRuns() {
    const bench::ModelBenchOptions defaults;
    const int64_t context = info_.max_positions;
    if (prompt_tokens_.empty()) prompt_tokens_ = {std::min(defaults.prompt_tokens, context / 2)};
    if (new_tokens_.empty()) {
      const int64_t longest = *std::max_element(prompt_tokens_.begin(), prompt_tokens_.end());
      new_tokens_ = {
          std::min(defaults.new_tokens.front(), std::max<int64_t>(context - longest, 1))};
    }
    std::vector<bench::ModelBenchOptions> runs;
    for (const int64_t batch : batch_) {
      for (const int64_t prompt : prompt_tokens_) {
        bench::ModelBenchOptions& run = runs.emplace_back();
        run.prompt_tokens = prompt;
        run.new_tokens = new_tokens_;
        run.batch = batch;
        run.profile = profile_;
        run.timing = common_.Timing();
        MARLIN_RETURN_IF_ERROR(bench::CheckModelBench(info_, run));
      }
    }
    return runs;
  }

  Json Document(const Machine& machine, const std::vector<bench::ModelPhase>& phases) const {
    Json document = machine.Document(common_.commit);
    Json& model = document["model"];
    model = {{"path", path_},          {"model_type", info_.model_type},
             {"recipe", info_.recipe}, {"parameters", info_.parameters},
             {"bytes", info_.bytes},   {"bits_per_weight", info_.bits_per_weight}};
    model["ends"] = EndsDocument(info_.ends);
    if (info_.host_layers > 0) {
      model["host_layers"] = info_.host_layers;
      model["host_bytes"] = info_.host_bytes;
      model["host_bytes_per_token"] = info_.host_bytes_per_token;
    }
    // What has several values is in the rows alone.
    if (prompt_tokens_.size() == 1) model["prompt_tokens"] = prompt_tokens_.front();
    if (new_tokens_.size() == 1) model["new_tokens"] = new_tokens_.front();
    model["batch_invariant"] = open_.batch_invariant;
    model["kv_cache"] = KvCacheTypeName(info_.kv_cache);
    if (batch_.size() == 1) model["batch"] = batch_.front();
    for (const bench::ModelPhase& phase : phases) {
      document["results"].push_back(bench::ModelJson(phase, machine.ceilings()));
    }
    for (const bench::SpeculatedRun& run : speculated_) {
      document["results"].push_back(bench::SpeculationJson(run));
    }
    return document;
  }

  std::string Text(const Machine& machine, const std::vector<bench::ModelPhase>& phases) const {
    const std::string fusion =
        info_.fusion.empty() ? "" : fmt::format("\nfused in decode: {}", info_.fusion);
    const std::string layers = layers_.empty() ? "" : "\n" + layers_;
    return fmt::format("{}{}: {} ({}), {} parameters, {}{}{}\n{}\n{}{}{}", machine.Heading(), path_,
                       info_.model_type, info_.recipe.empty() ? "plain" : info_.recipe,
                       FormatCount(info_.parameters), FormatBytes(info_.bytes), fusion, layers,
                       EndsLine(info_.ends), bench::ModelText(phases, machine.ceilings()),
                       bench::SpeculationText(speculated_), bench::ProfileText(phases));
  }

  std::string path_;
  std::vector<std::string> prompts_;
  std::vector<std::string> news_;
  std::vector<std::string> batches_;
  GpuLayersArgument gpu_layers_;
  std::optional<std::string> gpu_memory_;
  std::optional<int64_t> host_experts_;
  bool profile_ = false;
  KvCacheArgument kv_cache_;
  ModelOptions open_;
  BenchArguments common_;
  DraftArguments draft_;
  std::optional<std::string> tokens_;

  std::vector<int64_t> prompt_tokens_;
  std::vector<int64_t> new_tokens_;
  std::vector<int64_t> batch_;
  ModelInfo info_;
  std::string layers_;  ///< DescribeLayers.
  std::vector<bench::SpeculatedRun> speculated_;
};

}  // namespace

std::unique_ptr<Command> Make_bench_model() { return std::make_unique<BenchModelCommand>(); }

}  // namespace marlin::cli
