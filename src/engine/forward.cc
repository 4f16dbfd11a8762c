#include "engine/forward.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "marlin/decoder.h"
#include "model/mixer.h"
#include "model/placement.h"
#include "ops/decoder/sampling.h"

namespace marlin {
namespace {

constexpr int64_t kMinBlockBytes = int64_t{1} << 20;

}  // namespace

Result<size_t> Arena::Reserve(int64_t bytes) {
  while (at_.block < blocks_.size() && at_.used + bytes > blocks_[at_.block].bytes()) {
    at_ = {at_.block + 1, 0};
  }
  if (at_.block == blocks_.size()) {
    MARLIN_ASSIGN_OR_RETURN(DeviceBuffer block,
                            DeviceBuffer::Allocate(device_, std::max(bytes, kMinBlockBytes)));
    blocks_.push_back(std::move(block));
  }
  return at_.block;
}

Result<MutableTensorView> Arena::Take(DType type, const Shape& shape) {
  const int64_t bytes = RoundUp(shape.ElementCount() * DTypeBytes(type), kBufferAlignment);
  MARLIN_ASSIGN_OR_RETURN(const size_t block, Reserve(bytes));
  void* data = static_cast<uint8_t*>(blocks_[block].data()) + at_.used;
  at_.used += bytes;
  return MutableTensorView(data, type, shape);
}

Result<void*> Arena::Expanded(int64_t bytes) {
  if (expanded_.bytes() < bytes) {
    MARLIN_ASSIGN_OR_RETURN(expanded_, DeviceBuffer::Allocate(device_, bytes));
  }
  return expanded_.data();
}

Result<MutableTensorView> Arena::Upload(std::span<const int32_t> values) {
  const auto count = static_cast<int64_t>(values.size());
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView view, Take(DType::kI32, {count}));
  const DeviceBuffer& block = blocks_[at_.block];
  const int64_t offset = view.As<uint8_t>() - static_cast<uint8_t*>(block.data());
  MARLIN_RETURN_IF_ERROR(block.CopyFrom(values.data(), view.ByteCount(), offset));
  return view;
}

Result<std::pair<const DeviceBuffer*, int64_t>> Arena::Find(const TensorView& view) const {
  for (const DeviceBuffer& block : blocks_) {
    const int64_t offset = view.As<uint8_t>() - static_cast<const uint8_t*>(block.data());
    if (offset >= 0 && offset < block.bytes()) return std::pair(&block, offset);
  }
  return Status(Code::kInternal, "arena: a view of other memory");
}

Status Arena::Download(const TensorView& view, void* host) const {
  MARLIN_ASSIGN_OR_RETURN(const auto place, Find(view));
  return place.first->CopyTo(host, view.ByteCount(), place.second);
}

Status Arena::Fill(const MutableTensorView& view, const void* host) const {
  MARLIN_ASSIGN_OR_RETURN(const auto place, Find(view));
  return place.first->CopyFrom(host, view.ByteCount(), place.second);
}

Status Normalize(const Pass& pass, const DeviceVector& norm, float epsilon, const TensorView& x,
                 const MutableTensorView& out) {
  MARLIN_RETURN_IF_ERROR(norm.empty()
                             ? Convert(pass.device, x, out, pass.stream())
                             : RmsNorm(pass.device, x, norm.view(), epsilon, out, pass.stream()));
  return Ended(pass, StepPart::kNorm);
}

Status NormalizeHidden(Pass& pass, const DeviceVector& norm, const MutableTensorView& out) {
  const bool centers = pass.decoder.config.family->layer_norms;
  if (norm.empty() || centers) MARLIN_RETURN_IF_ERROR(CompleteHidden(pass));
  // Only norms read hidden states, so that their mean can go for good.
  if (centers) MARLIN_RETURN_IF_ERROR(CenterRows(pass.device, pass.values.hidden, pass.stream()));
  const float epsilon = pass.decoder.config.hidden_epsilon();
  if (std::exchange(pass.residual, Residual::kComplete) == Residual::kComplete) {
    return Normalize(pass, norm, epsilon, pass.values.hidden, out);
  }
  MARLIN_RETURN_IF_ERROR(AddRmsNorm(pass.device, pass.block, pass.values.hidden, norm.view(),
                                    epsilon, out, pass.stream()));
  return Ended(pass, StepPart::kNorm);
}

Status AddBlock(Pass& pass, const DeviceVector& norm) {
  pass.residual = Residual::kLacksBlock;
  if (norm.empty()) return {};
  return Normalize(pass, norm, pass.decoder.config.epsilon, pass.block, pass.block);
}

namespace {

/// The factor that a layer ends with.
Status ScaleHidden(Pass& pass, float scale) {
  if (scale == 1.0F) return {};
  MARLIN_RETURN_IF_ERROR(CompleteHidden(pass));
  return ScaleAndCap(pass.device, pass.values.hidden, scale, 0.0F, pass.stream());
}

}  // namespace

Status AddLastBlock(Pass& pass, int64_t index) {
  const DecoderLayer& layer = pass.layer(index);
  MARLIN_RETURN_IF_ERROR(AddBlock(pass, layer.mlp_out_norm));
  return layer.embedding_gate.empty() ? ScaleHidden(pass, layer.scale) : Status();
}

Status TakeValues(Pass* pass) {
  const DecoderConfig& config = pass->decoder.config;
  const Dimensions& shape = config.shape;
  Arena& arena = pass->arena;
  StepValues& values = pass->values;
  const int64_t rows = pass->rows();
  const auto take = [&](int64_t width) { return arena.Take(DType::kF32, {rows, width}); };
  const DType activations = pass->products.activations;
  MARLIN_ASSIGN_OR_RETURN(values.hidden, take(shape.hidden));
  MARLIN_ASSIGN_OR_RETURN(pass->block, take(shape.hidden));
  if (!pass->decoder.layer_embeddings.empty() || !pass->decoder.part.embeds()) {
    const int64_t width = shape.layers * shape.layer_features;
    if (width > 0) {
      MARLIN_ASSIGN_OR_RETURN(pass->layer_embeddings, take(width));
    }
  }
  // The two halves of a layer reuse the same memory, unless they run at once.
  const Arena::Mark begin = arena.mark();
  std::vector<const Mixer*> mixers;
  int64_t mixed = 0;
  for (const DecoderLayer& layer : pass->decoder.layers) {
    mixed = std::max(mixed, layer.mixer.out.in);
    const Mixer* const mixer = layer.mixer.mixer;
    if (mixer == nullptr || std::find(mixers.begin(), mixers.end(), mixer) != mixers.end())
      continue;
    mixers.push_back(mixer);
    MARLIN_RETURN_IF_ERROR(mixer->TakeValues(pass));
  }
  if (mixed > 0) {
    MARLIN_ASSIGN_OR_RETURN(values.mixed, arena.Take(activations, {rows, mixed}));
  }
  const Arena::Mark mixed_end = arena.mark();
  if (!config.family->parallel) arena.Return(begin);
  int64_t inner = 0;
  for (const DecoderLayer& layer : pass->decoder.layers) inner = std::max(inner, layer.mlp.down.in);
  if (inner > 0 && shape.experts > 0 && config.family->mlp_beside) {
    MARLIN_ASSIGN_OR_RETURN(pass->beside, take(shape.hidden));
  }
  if (inner > 0) {
    MARLIN_ASSIGN_OR_RETURN(values.inner, arena.Take(activations, {rows, inner}));
  }
  if (shape.experts > 0) {
    const Shape selected{rows, config.router.top_k};
    MARLIN_ASSIGN_OR_RETURN(values.normed, take(shape.hidden));
    MARLIN_ASSIGN_OR_RETURN(values.expert_ids, arena.Take(DType::kI32, selected));
    MARLIN_ASSIGN_OR_RETURN(values.expert_weights, arena.Take(DType::kF32, selected));
  }
  if (arena.mark() < mixed_end) arena.Return(mixed_end);
  return {};
}

Status RunGate(const Pass& pass, const MlpLayer& mlp, const TensorView& x,
               const MutableTensorView& inner) {
  const DecoderConfig& config = pass.decoder.config;
  const int64_t rows = x.dim(0);
  const int64_t width = mlp.down.in;
  if (mlp.gate_up.parts.size() == 1 && !mlp.gate_up.has_bias() && config.gate_limit == 0.0F) {
    return ApplyGated(pass.device, mlp.gate_up, x, config.activation, pass.products, inner);
  }
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView both,
                          pass.arena.Take(DType::kF32, {rows, 2 * width}));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, mlp.gate_up, x, pass.products, both));
  const MutableTensorView gate(both.data(), DType::kF32, {rows, width}, {2 * width, 1});
  const MutableTensorView up(both.As<float>() + width, DType::kF32, {rows, width}, {2 * width, 1});
  return ApplyGate(pass.device, gate, up, inner,
                   {config.activation, config.gate_limit, config.gate_alpha}, pass.stream());
}

Status RunGateUp(Pass& pass, int64_t index) {
  const ArenaScope scope(pass.arena);
  const DecoderLayer& layer = pass.layer(index);
  const StepValues& values = pass.values;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(pass.products.activations, values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, layer.mlp_norm, x));
  MARLIN_RETURN_IF_ERROR(RunGate(pass, layer.mlp, x, InnerOf(pass, index)));
  return Ended(pass, StepPart::kGateUp);
}

Status RunProjectAdd(Pass& pass, int64_t index, bool from_inner) {
  const DecoderLayer& layer = pass.layer(index);
  // Parallel blocks follow each other without a norm between them.
  if (pass.decoder.config.family->parallel) MARLIN_RETURN_IF_ERROR(CompleteHidden(pass));
  if (from_inner) {
    MARLIN_RETURN_IF_ERROR(
        Apply(pass.device, layer.mlp.down, InnerOf(pass, index), pass.products, pass.block));
    MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kDown));
    return AddLastBlock(pass, index);
  }
  MARLIN_RETURN_IF_ERROR(
      Apply(pass.device, layer.mixer.out, MixedOf(pass, index), pass.products, pass.block));
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kOut));
  return AddBlock(pass, layer.attention_out_norm);
}

Status Embed(const Device& device, const Decoder& decoder, const TensorView& ids,
             const MutableTensorView& out, void* stream) {
  MARLIN_RETURN_IF_ERROR(
      decoder.embedding.empty()
          ? LookUpRows(device, decoder.embedding_projection.parts.front(), ids, out, stream)
          : LookUpRows(device, decoder.embedding, ids, out, stream));
  const float scale = decoder.config.hidden_scale();
  return scale == 1.0F ? Status() : ScaleAndCap(device, out, scale, 0.0F, stream);
}

Status EmbedLayers(const Device& device, const Decoder& decoder, const TensorView& ids,
                   const TensorView& x, const ProductOptions& products, Arena* arena,
                   const MutableTensorView& out) {
  const ArenaScope scope(*arena);
  const LayerEmbeddings& own = decoder.layer_embeddings;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView found, arena->Take(DType::kF32, out.shape()));
  MARLIN_RETURN_IF_ERROR(
      own.table.empty() ? LookUpRows(device, own.weights.parts.front(), ids, found, products.stream)
                        : LookUpRows(device, own.table, ids, found, products.stream));
  MARLIN_RETURN_IF_ERROR(Apply(device, own.projection, x, products, out));
  const int64_t features = decoder.config.shape.layer_features;
  const MutableTensorView layers(out.data(), DType::kF32,
                                 {out.ElementCount() / features, features});
  // The product divided by the square root of its inputs' number.
  const float epsilon = decoder.config.epsilon * static_cast<float>(x.dim(1));
  MARLIN_RETURN_IF_ERROR(
      RmsNorm(device, layers, own.norm.view(), epsilon, layers, products.stream));
  return AddTo(device, found, out, decoder.config.layer_embedding_scale, products.stream);
}

Status RunAddEmbedding(Pass& pass, int64_t index) {
  MARLIN_RETURN_IF_ERROR(CompleteHidden(pass));
  const ArenaScope scope(pass.arena);
  const DecoderLayer& layer = pass.layer(index);
  const MutableTensorView& all = pass.layer_embeddings;
  const int64_t features = layer.embedding_gate.out;
  const Shape shape{pass.rows(), features};
  const TensorView own(all.As<float>() + index * features, DType::kF32, shape, {all.dim(1), 1});
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView gate, pass.arena.Take(DType::kF32, shape));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView inner,
                          pass.arena.Take(pass.products.activations, shape));
  MARLIN_RETURN_IF_ERROR(
      Apply(pass.device, layer.embedding_gate, pass.values.hidden, pass.products, gate));
  MARLIN_RETURN_IF_ERROR(ApplyGate(pass.device, gate, own, inner,
                                   {pass.decoder.config.activation, 0.0F}, pass.stream()));
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kGateUp));
  MARLIN_RETURN_IF_ERROR(
      Apply(pass.device, layer.embedding_projection, inner, pass.products, pass.block));
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kDown));
  MARLIN_RETURN_IF_ERROR(AddBlock(pass, layer.embedding_norm));
  return ScaleHidden(pass, layer.scale);
}

Status ApplyHead(const Device& device, const Decoder& decoder, const TensorView& x,
                 const ProductOptions& products, const MutableTensorView& logits) {
  MARLIN_RETURN_IF_ERROR(Apply(device, decoder.lm_head(), x, products, logits));
  const float softcap = decoder.config.logit_softcap;
  return softcap == 0.0F ? Status() : ScaleAndCap(device, logits, 1.0F, softcap, products.stream);
}

Status RunMixer(Pass& pass, int64_t layer, bool first) {
  const Mixer& mixer = *pass.layer(layer).mixer.mixer;
  for (const MixerOperation& operation : mixer.Operations()) {
    MARLIN_RETURN_IF_ERROR(mixer.Run(pass, operation.kind, layer));
    if (first) break;
  }
  return {};
}

Status CompleteHidden(Pass& pass) {
  if (std::exchange(pass.residual, Residual::kComplete) == Residual::kComplete) return {};
  MARLIN_RETURN_IF_ERROR(AddTo(pass.device, pass.block, pass.values.hidden, 1.0F, pass.stream()));
  return Ended(pass, StepPart::kResidual);
}

namespace {

/// hidden = the projection of [norm(embedding), norm(previous)]: the order of vLLM's
/// DeepSeekMultiTokenPredictorLayer and Qwen3NextMultiTokenPredictor, and of SGLang's
/// DeepseekModelNextN. vLLM's first class also replaces the embedding at position 0 by zeros, which
/// the others do not, and neither does this.
Status RunJoin(const Pass& pass) {
  const JoinLayer& join = pass.decoder.join;
  const MutableTensorView& hidden = pass.values.hidden;
  const int64_t width = hidden.dim(1);
  if (!(pass.previous.shape() == hidden.shape())) {
    return Status(Code::kInvalidArgument, "draft: expected a hidden state for each token");
  }
  const ArenaScope scope(pass.arena);
  const DType type = pass.products.activations;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView both,
                          pass.arena.Take(type, {pass.rows(), 2 * width}));
  const auto half = [&](int64_t first) {
    auto* const data = both.As<uint8_t>() + first * DTypeBytes(type);
    return MutableTensorView(data, type, hidden.shape(), {2 * width, 1});
  };
  const float epsilon = pass.decoder.config.epsilon;
  MARLIN_RETURN_IF_ERROR(Normalize(pass, join.embedding_norm, epsilon, hidden, half(0)));
  MARLIN_RETURN_IF_ERROR(Normalize(pass, join.hidden_norm, epsilon, pass.previous, half(width)));
  return Apply(pass.device, join.projection, both, pass.products, hidden);
}

Status RunEmbed(const Pass& pass) {
  MARLIN_RETURN_IF_ERROR(
      Embed(pass.device, pass.decoder, pass.values.ids, pass.values.hidden, pass.stream()));
  if (pass.decoder.joins()) MARLIN_RETURN_IF_ERROR(RunJoin(pass));
  return Ended(pass, StepPart::kEmbed);
}

Status RunEmbedLayers(const Pass& pass) {
  MARLIN_RETURN_IF_ERROR(EmbedLayers(pass.device, pass.decoder, pass.values.ids, pass.values.hidden,
                                     pass.products, &pass.arena, pass.layer_embeddings));
  return Ended(pass, StepPart::kEmbed);
}

/// The hidden states of the rows that get logits, in the arena.
Result<MutableTensorView> TakeWanted(Pass& pass) {
  const StepValues& values = pass.values;
  const Shape shape{values.wanted.dim(0), values.hidden.dim(1)};
  const auto take = [&](const TensorView& all) -> Result<MutableTensorView> {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView rows, pass.arena.Take(DType::kF32, shape));
    MARLIN_RETURN_IF_ERROR(LookUpRows(pass.device, all, values.wanted, rows, pass.stream()));
    return rows;
  };
  // To complete all rows is one launch less, and no more work where most of them are wanted.
  const bool most = 2 * values.wanted.dim(0) >= values.rows();
  if (most || !values.hidden_out.empty()) MARLIN_RETURN_IF_ERROR(CompleteHidden(pass));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView wanted, take(values.hidden));
  // Nothing reads the other rows, which lack the last block for good.
  if (std::exchange(pass.residual, Residual::kComplete) == Residual::kLacksBlock) {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView block, take(pass.block));
    MARLIN_RETURN_IF_ERROR(AddTo(pass.device, block, wanted, 1.0F, pass.stream()));
  }
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kHead));
  return wanted;
}

Status RunLogits(Pass& pass) {
  const StepValues& values = pass.values;
  const int64_t rows = values.wanted.dim(0);
  if (rows == 0) return {};
  const ArenaScope scope(pass.arena);
  const DType activations = pass.products.activations;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView last,
                          pass.arena.Take(activations, {rows, values.hidden.dim(1)}));
  if (rows == pass.rows()) {
    MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, pass.decoder.norm, last));
  } else {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView wanted, TakeWanted(pass));
    if (pass.decoder.config.family->layer_norms) {
      MARLIN_RETURN_IF_ERROR(CenterRows(pass.device, wanted, pass.stream()));
    }
    MARLIN_RETURN_IF_ERROR(
        Normalize(pass, pass.decoder.norm, pass.decoder.config.hidden_epsilon(), wanted, last));
  }
  MARLIN_RETURN_IF_ERROR(ApplyHead(pass.device, pass.decoder, last, pass.products, values.logits));
  return Ended(pass, StepPart::kHead);
}

Status RunHead(Pass& pass) {
  MARLIN_RETURN_IF_ERROR(RunLogits(pass));
  const MutableTensorView& out = pass.values.hidden_out;
  return out.empty() ? Status() : NormalizeHidden(pass, pass.decoder.norm, out);
}

Status RunSample(const Pass& pass) {
  const StepValues& values = pass.values;
  if (values.tokens.empty() || values.wanted.dim(0) == 0) return {};
  const SampleTokensCall call = {values.logits,       values.samplers, values.tokens,
                                 values.sampler_rows, /*marks=*/true,  values.allowed,
                                 values.allowed_rows, values.drafts};
  if (!values.samplers.empty()) {
    MARLIN_RETURN_IF_ERROR(SampleRows(pass.device, call, pass.stream()));
  }
  if (!values.logprobs.of_ids.empty()) {
    MARLIN_RETURN_IF_ERROR(LogProbabilities(pass.device, values.logits, values.tokens,
                                            values.logprobs, pass.stream()));
  }
  return Ended(pass, StepPart::kSample);
}

Status RunPieces(Pass& pass, StepKind kind, int64_t layer, bool from_inner) {
  switch (kind) {
    case StepKind::kEmbed:
      return RunEmbed(pass);
    case StepKind::kProject:
    case StepKind::kLatentProject:
    case StepKind::kAttention:
    case StepKind::kMix:
    case StepKind::kGatedDelta:
      return pass.layer(layer).mixer.mixer->Run(pass, kind, layer);
    case StepKind::kProjectAdd:
      return RunProjectAdd(pass, layer, from_inner);
    case StepKind::kGateUp:
      return RunGateUp(pass, layer);
    case StepKind::kRoute:
      return RunRoute(pass, layer);
    case StepKind::kExperts:
      return RunExperts(pass, layer);
    case StepKind::kBeside:
      return RunBeside(pass, layer);
    case StepKind::kEmbedLayers:
      return RunEmbedLayers(pass);
    case StepKind::kAddEmbedding:
      return RunAddEmbedding(pass, layer);
    case StepKind::kHead:
      return RunHead(pass);
    case StepKind::kSample:
      return RunSample(pass);
  }
  return Status(Code::kInternal, "step: an unknown operation");
}

}  // namespace

StepProgram::Part StepProgram::PartOf(const StepOperation& operation) {
  const auto* const add = std::get_if<ProjectAddStep>(&operation);
  const auto layer = [](const auto& step) -> int64_t {
    if constexpr (requires { step.layer; }) return step.layer;
    return 0;
  };
  return {KindOf(operation), add != nullptr && add->from == ProjectAddStep::From::kInner,
          std::visit(layer, operation), nullptr, 0};
}

void StepProgram::AddOperations(std::span<const StepOperation> operations) {
  for (const StepOperation& operation : operations) parts_.push_back(PartOf(operation));
}

size_t StepProgram::BeginRun(FusedRun run, const StepOperation& first) {
  parts_.push_back(PartOf(first));
  parts_.back().fused = std::move(run.operations);
  return parts_.size() - 1;
}

Status StepProgram::AddRun(const DecoderBackend& backend, FusedRun run,
                           std::span<const StepOperation> operations) {
  fused_ += operations.size();
  const size_t whole = BeginRun(std::move(run), operations.front());
  while (!operations.empty()) {
    MARLIN_ASSIGN_OR_RETURN(FusedRun within, backend.FuseWithin(*step_, operations));
    const size_t count = within.count;
    if (count == 0) {
      AddOperations(operations.first(1));
      operations = operations.subspan(1);
      continue;
    }
    const size_t part = BeginRun(std::move(within), operations.front());
    AddOperations(operations.first(count));
    EndRun(part);
    operations = operations.subspan(count);
  }
  EndRun(whole);
  return {};
}

Result<StepProgram> StepProgram::Make(const Device& device, const Decoder& decoder,
                                      StepDescription step) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* backend, DecoderOf(device));
  StepProgram program;
  program.step_ = std::make_unique<const StepDescription>(std::move(step));
  std::span<const StepOperation> left = program.step_->operations;
  while (!left.empty()) {
    // A fused run would not read the hidden states that this decoder joins to its embeddings.
    FusedRun run;
    if (!decoder.joins() || KindOf(left.front()) != StepKind::kEmbed) {
      MARLIN_ASSIGN_OR_RETURN(run, backend->Fuse(*program.step_, left));
    }
    if (program.refusal_.empty()) program.refusal_ = std::move(run.refusal);
    const size_t count = std::max<size_t>(run.count, 1);
    if (run.count == 0) {
      const Part part = PartOf(left.front());
      MARLIN_RETURN_IF_ERROR(
          CheckUnfused(device, part.kind, MixerOf(decoder.config.mixer(part.layer))));
      program.AddOperations(left.first(1));
    } else {
      MARLIN_RETURN_IF_ERROR(program.AddRun(*backend, std::move(run), left.first(count)));
    }
    left = left.subspan(count);
  }
  return program;
}

std::string StepProgram::fusion() const {
  if (fused_ == 0 && refusal_.empty()) return {};
  const std::string reason = refusal_.empty() ? "" : fmt::format(" ({})", refusal_);
  return fmt::format("{} of {} operations{}", fused_, step_->operations.size(), reason);
}

Status StepProgram::Run(Pass& pass) const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    if (part.fused == nullptr) {
      MARLIN_RETURN_IF_ERROR(RunPieces(pass, part.kind, part.layer, part.from_inner));
      continue;
    }
    // A fused run does not tell what its routers select.
    if (pass.routing != nullptr || !part.fused->Takes(pass.values)) continue;
    MARLIN_RETURN_IF_ERROR(CompleteHidden(pass));
    MARLIN_RETURN_IF_ERROR(RunInWorkspace(
        pass.device, pass.stream(), part.fused->WorkspaceBytes(pass.values), [&](void* workspace) {
          return part.fused->Run(pass.values, {pass.stream(), workspace});
        }));
    MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kFused));
    i += part.replaced;
  }
  return {};
}

}  // namespace marlin
