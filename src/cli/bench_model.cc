#include "cli/bench_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/macros.h"
#include "cli/bench_timer.h"
#include "cli/table.h"
#include "marlin/model.h"
#include "model/layers.h"
#include "model/model_impl.h"

namespace marlin::cli {
namespace {

using Json = nlohmann::ordered_json;

/// The products of a forward call without anything else.
class Products {
 public:
  explicit Products(const Model& model) : model_(model), impl_(model.impl()) {}

  /// `rows` tokens through all layers, the last of them through the head.
  Status Run(int64_t rows) {
    const Dimensions& shape = impl_.decoder.config.shape;
    for (const DecoderLayer& layer : impl_.decoder.layers) {
      for (const Projection* projection :
           {&layer.attention.qkv, &layer.attention.out, &layer.latent.q, &layer.latent.q_a,
            &layer.latent.q_b, &layer.latent.kv_a, &layer.latent.kv_b, &layer.latent.out}) {
        MARLIN_RETURN_IF_ERROR(Multiply(*projection, rows));
      }
      MARLIN_RETURN_IF_ERROR(RunMlp(layer.mlp, rows));
      MARLIN_RETURN_IF_ERROR(RunMlp(layer.experts.shared, rows));
      // Every expert gets its share of the tokens.
      const auto experts = static_cast<int64_t>(layer.experts.experts.size());
      if (experts == 0) continue;
      MARLIN_RETURN_IF_ERROR(Multiply(layer.experts.router, rows));
      const int64_t visits = rows * shape.top_k;
      const int64_t visited = std::min(experts, visits);
      for (int64_t expert = 0; expert < visited; ++expert) {
        const int64_t share = visits / visited + (expert < visits % visited ? 1 : 0);
        MARLIN_RETURN_IF_ERROR(RunMlp(layer.experts.experts[static_cast<size_t>(expert)], share));
      }
    }
    return Multiply(impl_.decoder.lm_head(), 1);
  }

 private:
  Status RunMlp(const MlpLayer& mlp, int64_t rows) {
    if (mlp.down.empty()) return {};
    const bool fused = mlp.gate_up.parts.size() == 1 && mlp.gate_up.bias.empty();
    if (fused) {
      const auto [x, out] = Buffers(mlp.gate_up, rows);
      const MutableTensorView half(out.data(), DType::kF32, {rows, mlp.gate_up.out / 2});
      MARLIN_RETURN_IF_ERROR(
          ApplyGated(model_.device(), mlp.gate_up, x, Activation::kSilu, impl_.products, half));
    } else {
      MARLIN_RETURN_IF_ERROR(Multiply(mlp.gate_up, rows));
    }
    return Multiply(mlp.down, rows);
  }

  Status Multiply(const Projection& projection, int64_t rows) {
    if (projection.empty()) return {};
    const auto [x, out] = Buffers(projection, rows);
    return Apply(model_.device(), projection, x, impl_.products, out);
  }

  struct Pair {
    TensorView x;
    MutableTensorView out;
  };
  Pair Buffers(const Projection& projection, int64_t rows) {
    const auto grow = [](std::vector<float>& buffer, int64_t count) {
      if (static_cast<int64_t>(buffer.size()) < count) {
        buffer.resize(static_cast<size_t>(count), 0.5F);
      }
      return buffer.data();
    };
    return {{grow(x_, rows * projection.in), DType::kF32, {rows, projection.in}},
            {grow(out_, rows * projection.out), DType::kF32, {rows, projection.out}}};
  }

  const Model& model_;
  const Model::Impl& impl_;
  std::vector<float> x_;
  std::vector<float> out_;
};

struct Phase {
  const char* name;
  int64_t tokens;
  Timing timing;
  Timing products;

  double TokensPerSecond() const { return static_cast<double>(tokens) / timing.median; }
  /// What the products alone would take of the time.
  double Fraction() const { return products.median / timing.median; }
};

Json PhaseJson(const Phase& phase) {
  return {{"op", phase.name},
          {"tokens", phase.tokens},
          {"seconds", phase.timing.median},
          {"p10", phase.timing.p10},
          {"p90", phase.timing.p90},
          {"tokens_per_second", phase.TokensPerSecond()},
          {"products_seconds", phase.products.median},
          {"roofline_fraction", phase.Fraction()}};
}

/// Runs both phases in turn with the products of the same shapes.
class ModelBench {
 public:
  ModelBench(const Model& model, int64_t prompt_tokens)
      : model_(model), products_(model), prompt_(static_cast<size_t>(prompt_tokens)) {
    const int64_t vocab = model.info().vocab_size;
    for (size_t i = 0; i < prompt_.size(); ++i) {
      prompt_[i] = static_cast<int32_t>(static_cast<int64_t>(i) * 7919 % vocab);
    }
    logits_.resize(static_cast<size_t>(vocab));
  }

  Result<std::vector<Phase>> Run() {
    MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model_.NewSequence());
    const auto length = static_cast<int64_t>(prompt_.size());
    // The first pass makes the buffers.
    MARLIN_RETURN_IF_ERROR(Feed(sequence, 0, prompt_));
    std::vector<Phase> phases = {{"prefill", length, {}, {}}, {"decode", 1, {}, {}}};
    for (Phase& phase : phases) {
      const bool prefill = phase.tokens > 1;
      const std::span<const int32_t> tokens =
          prefill ? std::span<const int32_t>(prompt_) : std::span<const int32_t>(prompt_).first(1);
      const int64_t before = prefill ? 0 : length;
      const auto forward = [&](int64_t) { Note(Feed(sequence, before, tokens)); };
      const auto multiply = [&](int64_t) { Note(products_.Run(phase.tokens)); };
      if (!prefill) MARLIN_RETURN_IF_ERROR(Feed(sequence, 0, prompt_));
      const std::vector<Timing> timings = MeasureTogether({forward, multiply});
      phase.timing = timings[0];
      phase.products = timings[1];
    }
    MARLIN_RETURN_IF_ERROR(failure_);
    return phases;
  }

 private:
  Status Feed(Sequence& sequence, int64_t before, std::span<const int32_t> tokens) {
    MARLIN_RETURN_IF_ERROR(sequence.Truncate(std::min(before, sequence.length())));
    const MutableTensorView row(logits_.data(), DType::kF32,
                                {1, static_cast<int64_t>(logits_.size())});
    const SequenceInput input{&sequence, tokens, false};
    return model_.Forward({&input, 1}, row);
  }
  void Note(const Status& status) {
    if (failure_.ok()) failure_ = status;
  }

  const Model& model_;
  Products products_;
  std::vector<int32_t> prompt_;
  std::vector<float> logits_;
  Status failure_;
};

}  // namespace

Status BenchModel(Console& console, const Device& device, const ModelBenchOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(const Model model, Model::Open(options.path, device));
  const ModelInfo& info = model.info();
  if (options.prompt_tokens < 1 || options.prompt_tokens >= info.max_positions) {
    return Status(Code::kInvalidArgument,
                  fmt::format("--prompt-tokens: expected 1..{} (the context), got {}",
                              info.max_positions - 1, options.prompt_tokens));
  }
  MARLIN_ASSIGN_OR_RETURN(const std::vector<Phase> phases,
                          ModelBench(model, options.prompt_tokens).Run());
  const DeviceInfo machine = device.info();
  if (console.json()) {
    Json document = {
        {"device",
         {{"name", machine.name}, {"model", machine.model}, {"threads", machine.threads}}},
        {"commit", options.commit},
        {"model", options.path},
        {"model_type", info.model_type},
        {"recipe", info.recipe},
        {"parameters", info.parameters},
        {"bytes", info.bytes},
        {"results", Json::array()}};
    for (const Phase& phase : phases) document["results"].push_back(PhaseJson(phase));
    return console.PrintJson(document);
  }
  Table table({"phase", "tokens", "ms", "10 to 90 %", "tokens/s", "products alone"});
  for (const Phase& phase : phases) {
    table.AddRow({phase.name, std::to_string(phase.tokens),
                  fmt::format("{:.2f}", 1e3 * phase.timing.median),
                  fmt::format("{:.2f} to {:.2f}", 1e3 * phase.timing.p10, 1e3 * phase.timing.p90),
                  fmt::format("{:.1f}", phase.TokensPerSecond()),
                  fmt::format("{:.0f} %", 100 * phase.Fraction())});
  }
  return console.Print(fmt::format(
      "{}: {} ({}), {} parameters, {}; {}, {} threads\n\n{}", options.path, info.model_type,
      info.recipe.empty() ? "plain" : info.recipe, FormatCount(info.parameters),
      FormatBytes(info.bytes), machine.model, machine.threads, table.ToString()));
}

}  // namespace marlin::cli
