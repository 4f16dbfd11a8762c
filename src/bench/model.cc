#include "bench/model.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <utility>

#include "base/macros.h"
#include "engine/decode_call.h"
#include "engine/forward_call.h"
#include "engine/model_impl.h"
#include "marlin/sampling.h"
#include "model/layers.h"
#include "model/placement.h"

namespace marlin::bench {
namespace {

/// The GEMMs of a forward call without anything else.
class Products {
 public:
  explicit Products(const Model::Impl& impl) : impl_(impl) {
    if (impl.host != nullptr) host_ = std::make_unique<Products>(*impl.host);
  }

  /// Runs `rows` tokens through all layers in passes as long as the model's, and `head_rows` of
  /// them through the head. Every call begins with other experts.
  Status Run(int64_t rows, int64_t head_rows) {
    weight_bytes_ = 0;
    operations_ = 0;
    if (host_ != nullptr) MARLIN_RETURN_IF_ERROR(RunHost(rows));
    const int64_t most = Internals::Impl(impl_.device).backend().pass_tokens();
    for (int64_t done = 0; done < rows; done += most) {
      MARLIN_RETURN_IF_ERROR(RunPass(std::min(rows - done, most)));
    }
    ++calls_;
    if (head_rows > 0) MARLIN_RETURN_IF_ERROR(Multiply(impl_.decoder.lm_head(), head_rows));
    return impl_.device.Synchronize();
  }

  /// Figures of the last call; weights count in every pass that reads them.
  double weight_bytes() const { return weight_bytes_; }
  double operations() const { return operations_; }

 private:
  /// The layers before the device's.
  Status RunHost(int64_t rows) {
    MARLIN_RETURN_IF_ERROR(host_->Run(rows, 0));
    weight_bytes_ = host_->weight_bytes_;
    operations_ = host_->operations_;
    return {};
  }

  Status RunPass(int64_t rows) {
    for (const DecoderLayer& layer : impl_.decoder.layers) {
      for (const Projection& projection : layer.mixer.projections) {
        MARLIN_RETURN_IF_ERROR(Multiply(projection, rows));
      }
      MARLIN_RETURN_IF_ERROR(Multiply(layer.mixer.out, rows));
      MARLIN_RETURN_IF_ERROR(RunMlp(layer.mlp, rows));
      MARLIN_RETURN_IF_ERROR(RunExperts(layer.experts, rows));
    }
    return {};
  }

  Status RunExperts(const ExpertsLayer& layer, int64_t rows) {
    const auto experts = static_cast<int64_t>(layer.experts.size());
    if (experts == 0) return {};
    MARLIN_RETURN_IF_ERROR(Multiply(layer.router, rows));
    const int64_t visits = rows * impl_.decoder.config.shape.top_k;
    const int64_t visited = std::min(experts, visits);
    if (layer.placed.count() > 0 || !ReadsHostMemory(impl_.device)) {
      MARLIN_RETURN_IF_ERROR(RunInOneCall(layer, rows, visited));
      return {};
    }
    MARLIN_RETURN_IF_ERROR(RunMlp(layer.shared, rows));
    for (int64_t i = 0; i < visited; ++i) {
      const int64_t expert = (calls_ * visited + i) % experts;
      const int64_t share = visits / visited + (i < visits % visited ? 1 : 0);
      MARLIN_RETURN_IF_ERROR(RunMlp(layer.experts[static_cast<size_t>(expert)], share));
    }
    return Multiply(layer.shared_gate, rows);
  }

  Result<ExpertsPlan> PlanOf(const ExpertsLayer& layer, const ExpertsProblem& problem) const {
    if (layer.placed.count() > 0) return PlanExperts(impl_.device, problem, layer.placed);
    return PlanExperts(impl_.device, problem, layer.set);
  }

  /// A GPU runs the experts of a layer in one call, the shared one included, and so does any device
  /// whose experts are in part on the host.
  Status RunInOneCall(const ExpertsLayer& layer, int64_t rows, int64_t visited) {
    const DecoderConfig& config = impl_.decoder.config;
    const auto experts = static_cast<int64_t>(layer.experts.size());
    const int64_t selections = rows * config.shape.top_k;
    std::vector<int32_t> ids(static_cast<size_t>(selections));
    for (int64_t i = 0; i < selections; ++i) {
      ids[static_cast<size_t>(i)] =
          static_cast<int32_t>((calls_ * visited + i % visited) % experts);
    }
    for (int64_t i = 0; i < visited; ++i) {
      Count(layer.experts[static_cast<size_t>((calls_ * visited + i) % experts)].gate_up, 0);
      Count(layer.experts[static_cast<size_t>((calls_ * visited + i) % experts)].down, 0);
    }
    const MlpLayer& first = layer.experts.front();
    operations_ += 2.0 * static_cast<double>(selections) * static_cast<double>(first.down.out) *
                   static_cast<double>(first.gate_up.out + first.down.in);
    const int64_t hidden = config.shape.hidden;
    const int64_t count = selections * int64_t{sizeof(float)};
    MARLIN_RETURN_IF_ERROR(Grow(&x_, rows * hidden));
    MARLIN_RETURN_IF_ERROR(Grow(&out_, rows * hidden));
    MARLIN_RETURN_IF_ERROR(Grow(&weights_, selections));
    if (ids_.bytes() < count) {
      MARLIN_ASSIGN_OR_RETURN(ids_, DeviceBuffer::Allocate(impl_.device, count));
    }
    MARLIN_RETURN_IF_ERROR(ids_.CopyFrom(ids.data(), count));
    const ExpertsProblem problem{rows,
                                 config.shape.top_k,
                                 DType::kF32,
                                 DType::kF32,
                                 {config.activation, config.gate_limit, config.gate_alpha},
                                 impl_.products.accuracy,
                                 impl_.products.determinism,
                                 impl_.products.allow_bf16_activations};
    MARLIN_ASSIGN_OR_RETURN(const ExpertsPlan plan, PlanOf(layer, problem));
    const Shape selected{rows, config.shape.top_k};
    return plan.Run({x_.data(), DType::kF32, {rows, hidden}}, {ids_.data(), DType::kI32, selected},
                    {weights_.data(), DType::kF32, selected},
                    {out_.data(), DType::kF32, {rows, hidden}});
  }

  Status RunMlp(const MlpLayer& mlp, int64_t rows) {
    if (mlp.down.empty()) return {};
    if (mlp.gate_up.parts.size() == 1 && !mlp.gate_up.has_bias()) {
      MARLIN_ASSIGN_OR_RETURN(const Pair operands, Operands(mlp.gate_up, rows));
      const MutableTensorView half(operands.out.data(), DType::kF32, {rows, mlp.gate_up.out / 2});
      MARLIN_RETURN_IF_ERROR(ApplyGated(impl_.device, mlp.gate_up, operands.x, Activation::kSilu,
                                        impl_.products, half));
    } else {
      MARLIN_RETURN_IF_ERROR(Multiply(mlp.gate_up, rows));
    }
    return Multiply(mlp.down, rows);
  }

  Status Multiply(const Projection& projection, int64_t rows) {
    if (projection.empty()) return {};
    MARLIN_ASSIGN_OR_RETURN(const Pair operands, Operands(projection, rows));
    return Apply(impl_.device, projection, operands.x, impl_.products, operands.out);
  }

  struct Pair {
    TensorView x;
    MutableTensorView out;
  };
  /// Adds the bytes and operations of a GEMM to the counts.
  void Count(const Projection& projection, int64_t rows) {
    for (const PreparedWeights& part : projection.parts) {
      weight_bytes_ += static_cast<double>(part.bytes());
    }
    operations_ += 2.0 * static_cast<double>(rows) * static_cast<double>(projection.in) *
                   static_cast<double>(projection.out);
  }

  /// The operands of a GEMM, which is counted.
  Result<Pair> Operands(const Projection& projection, int64_t rows) {
    Count(projection, rows);
    MARLIN_RETURN_IF_ERROR(Grow(&x_, rows * projection.in));
    MARLIN_RETURN_IF_ERROR(Grow(&out_, rows * projection.out));
    return Pair{{x_.data(), DType::kF32, {rows, projection.in}},
                {out_.data(), DType::kF32, {rows, projection.out}}};
  }

  /// Makes room for `count` floats and fills it with 0.5, far from subnormal numbers.
  Status Grow(DeviceBuffer* buffer, int64_t count) const {
    const int64_t bytes = count * int64_t{sizeof(float)};
    if (buffer->bytes() >= bytes) return {};
    MARLIN_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(impl_.device, bytes));
    const std::vector<float> values(static_cast<size_t>(count), 0.5F);
    return buffer->CopyFrom(values.data(), bytes);
  }

  const Model::Impl& impl_;
  std::unique_ptr<Products> host_;
  DeviceBuffer x_;
  DeviceBuffer out_;
  DeviceBuffer ids_;
  DeviceBuffer weights_;
  int64_t calls_ = 0;
  double weight_bytes_ = 0;
  double operations_ = 0;
};

/// Runs both phases in turn with GEMMs of the same shapes.
class ModelBench {
 public:
  ModelBench(const Model& model, const ModelBenchOptions& options)
      : model_(model), options_(options), products_(Internals::Impl(model)) {
    tokens_.resize(static_cast<size_t>(options.prompt_tokens + options.batch));
    for (int32_t& token : tokens_) token = NextToken();
    sampled_.resize(static_cast<size_t>(options.batch * kMostDecodeSteps));
    counts_.resize(static_cast<size_t>(options.batch));
  }

  Result<std::vector<ModelPhase>> Run() {
    for (int64_t i = 0; i < options_.batch; ++i) {
      MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model_.NewSequence());
      sequences_.push_back(std::move(sequence));
    }
    MARLIN_RETURN_IF_ERROR(MakeSamplers());
    std::vector<ModelPhase> phases;
    if (options_.prompt_tokens > 0) {
      MARLIN_ASSIGN_OR_RETURN(phases.emplace_back(), Prefill());
    }
    for (const int64_t new_tokens : options_.new_tokens) {
      if (new_tokens == 0) continue;
      MARLIN_ASSIGN_OR_RETURN(phases.emplace_back(), Generate(new_tokens));
    }
    return phases;
  }

 private:
  ModelPhase Phase(const char* name, int64_t new_tokens, int64_t tokens) const {
    ModelPhase phase;
    phase.name = name;
    phase.prompt_tokens = options_.prompt_tokens;
    phase.new_tokens = new_tokens;
    phase.batch = options_.batch;
    phase.tokens = tokens * options_.batch;
    return phase;
  }

  Result<ModelPhase> Prefill() {
    const int64_t prompt = options_.prompt_tokens;
    ModelPhase phase = Phase("prefill", 0, prompt);
    MARLIN_RETURN_IF_ERROR(Measure(&phase, 1, [&] { return Feed(0, prompt); }));
    MARLIN_RETURN_IF_ERROR(Profile(&phase, [&] { return Feed(0, prompt); }));
    return phase;
  }

  Result<ModelPhase> Generate(int64_t new_tokens) {
    const int64_t prompt = options_.prompt_tokens;
    ModelPhase phase = Phase("decode", new_tokens, 1);
    steps_ = static_cast<int64_t>(
        std::bit_floor(static_cast<uint64_t>(std::min(new_tokens, kMostDecodeSteps))));
    if (prompt > 0) MARLIN_RETURN_IF_ERROR(Feed(0, prompt));
    for (const Sequence& sequence : sequences_) sequence.state()->cache.KeepStates();
    int64_t call = 0;
    const auto next = [&] { return prompt + call++ % (new_tokens / steps_) * steps_; };
    MARLIN_RETURN_IF_ERROR(Measure(&phase, steps_, [&] { return Decode(next()); }));
    MARLIN_RETURN_IF_ERROR(Profile(&phase, [&] { return Feed(prompt, 1); }));
    return phase;
  }

  /// Greedy samplers, as generation without options has.
  Status MakeSamplers() {
    const int64_t vocab = model_.info().vocab_size;
    MARLIN_ASSIGN_OR_RETURN(sampler_bytes_, SamplerStateBytes(model_.device(), vocab));
    MARLIN_ASSIGN_OR_RETURN(
        samplers_, DeviceBuffer::Allocate(model_.device(), options_.batch * sampler_bytes_));
    for (int64_t i = 0; i < options_.batch; ++i) {
      auto* const state = static_cast<uint8_t*>(samplers_.data()) + i * sampler_bytes_;
      MARLIN_RETURN_IF_ERROR(ResetSampler(model_.device(), {}, vocab,
                                          TensorView(nullptr, DType::kI32, {0}),
                                          {state, DType::kU8, {sampler_bytes_}}));
    }
    return model_.device().Synchronize();
  }

  /// Times calls of `steps` steps, per step.
  template <typename Forward>
  Status Measure(ModelPhase* phase, int64_t steps, Forward forward) {
    Status failure;
    const auto note = [&failure](const Status& status) {
      if (failure.ok()) failure = status;
    };
    const std::vector<Timing> timings =
        MeasureTogether({
                            [&](int64_t) { note(forward()); },
                            [&](int64_t) { note(products_.Run(phase->tokens, options_.batch)); },
                        },
                        options_.timing);
    phase->timing = PerCall(timings[0], steps);
    phase->products = timings[1];
    phase->weight_bytes = products_.weight_bytes();
    phase->operations = products_.operations();
    return failure;
  }

  /// Times the operations of a phase, if that is asked for, over several calls after a first one.
  template <typename Forward>
  Status Profile(ModelPhase* phase, Forward forward) {
    if (!options_.profile) return {};
    constexpr int kLeastCalls = 5;
    constexpr int kMostCalls = 50;
    const double seconds_in_all = std::min(1.0, options_.timing.max_seconds);
    // A device whose host computes experts or layers waits for it within the pass.
    const Model::Impl& impl = Internals::Impl(model_);
    const bool holds = impl.decoder.host_experts == 0 && impl.host == nullptr;
    MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<StreamMarks> marks,
                            Internals::Impl(model_.device()).backend().MakeMarks(nullptr, holds));
    StepTimer timer(std::move(marks));
    timer_ = &timer;
    Status status = forward();
    StepTimer::Sums sums = timer.Take();
    std::array<std::vector<double>, kStepParts> seconds;
    const Stopwatch watch;
    for (int call = 0; status.ok() && call < kMostCalls; ++call) {
      if (call >= kLeastCalls && watch.Seconds() > seconds_in_all) break;
      status = forward();
      sums = timer.Take();
      for (size_t part = 0; part < kStepParts; ++part) seconds[part].push_back(sums[part].seconds);
    }
    timer_ = nullptr;
    MARLIN_RETURN_IF_ERROR(status);
    for (size_t part = 0; part < kStepParts; ++part) {
      if (sums[part].count == 0) continue;
      phase->profile.push_back({static_cast<StepPart>(part), sums[part].count,
                                SummarizeSeconds(std::move(seconds[part])).median});
    }
    return {};
  }

  /// Feeds `count` tokens to every sequence, after its first `before`.
  Status Feed(int64_t before, int64_t count) {
    std::vector<SequenceInput> inputs;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      MARLIN_RETURN_IF_ERROR(sequences_[i].Truncate(before));
      if (count == 1) tokens_[i] = NextToken();
      inputs.push_back(
          {&sequences_[i], std::span(tokens_).subspan(i, static_cast<size_t>(count)), false});
    }
    Wanted wanted;
    wanted.timer = timer_;
    // Generation samples on the device, after a prompt as well: it never copies the logits.
    wanted.samplers = {samplers_.data(), DType::kU8, {options_.batch, sampler_bytes_}};
    wanted.tokens = std::span(sampled_).first(inputs.size());
    return RunForward(Internals::Impl(model_), inputs, wanted);
  }

  /// Decodes as generation does, after the first `before` tokens of every sequence.
  Status Decode(int64_t before) {
    std::vector<DecodeInput> inputs;
    for (Sequence& sequence : sequences_) {
      MARLIN_RETURN_IF_ERROR(sequence.Truncate(before));
      inputs.push_back({&sequence, NextToken()});
    }
    const MutableTensorView samplers(samplers_.data(), DType::kU8,
                                     {options_.batch, sampler_bytes_});
    const std::span<int32_t> sampled =
        std::span(sampled_).first(static_cast<size_t>(options_.batch * steps_));
    return RunDecode(Internals::Impl(model_), {inputs, samplers, {steps_, {}}, sampled, counts_});
  }

  /// Strides through the vocabulary, so that experts change from token to token.
  int32_t NextToken() {
    next_token_ = (next_token_ + 7919) % model_.info().vocab_size;
    return static_cast<int32_t>(next_token_);
  }

  const Model& model_;
  ModelBenchOptions options_;
  Products products_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> tokens_;
  DeviceBuffer samplers_;
  int64_t sampler_bytes_ = 0;
  int64_t steps_ = 1;  ///< Steps of a call that decodes.
  std::vector<int32_t> sampled_;
  std::vector<int64_t> counts_;
  int64_t next_token_ = 0;
  StepTimer* timer_ = nullptr;
};

Status CheckRange(const char* name, int64_t value, int64_t least, int64_t largest) {
  if (value >= least && value <= largest) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("{}: expected {}..{}, got {}", name, least, largest, value));
}

}  // namespace

Status CheckModelBench(const ModelInfo& model, const ModelBenchOptions& options) {
  const int64_t context = model.max_positions;
  const int64_t prompt = options.prompt_tokens;
  MARLIN_RETURN_IF_ERROR(CheckRange("--prompt-tokens", prompt, 0, context - 1));
  for (const int64_t new_tokens : options.new_tokens) {
    MARLIN_RETURN_IF_ERROR(
        CheckRange("--new-tokens", new_tokens, prompt > 0 ? 0 : 1, context - prompt));
  }
  return CheckRange("--batch", options.batch, 1, kMaxBatch);
}

Result<std::vector<ModelPhase>> BenchModel(const Model& model, const ModelBenchOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckModelBench(model.info(), options));
  return ModelBench(model, options).Run();
}

}  // namespace marlin::bench
