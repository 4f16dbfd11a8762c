#include "calibrate/layer_run.h"

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "engine/model_impl.h"
#include "marlin/decoder.h"
#include "model/placement.h"

namespace marlin {
namespace {

/// Fetches the inputs that a mixer computes for its projections.
class InnerInputs final : public InputObserver {
 public:
  InnerInputs(const Pass& pass, FunctionRef<Status(const TensorView&, HostRows*)> fetch,
              InputRows* inputs)
      : pass_(pass), fetch_(fetch), inputs_(inputs) {}

  Status Add(size_t input, const TensorView& all) override {
    const int64_t rows = all.dim(0);
    const int64_t width = all.dim(1);
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView packed,
                            pass_.arena.Take(DType::kF32, {rows, 1, width}));
    const TensorView heads(all.data(), DType::kF32, {rows, 1, width}, {all.stride(0), width, 1});
    MARLIN_RETURN_IF_ERROR(Convert(pass_.device, heads, packed, pass_.stream()));
    return fetch_(packed, &(*inputs_)[input]);
  }

 private:
  const Pass& pass_;
  FunctionRef<Status(const TensorView&, HostRows*)> fetch_;
  InputRows* inputs_;
};

class Selections final : public RoutingObserver {
 public:
  explicit Selections(std::vector<int32_t>* all) : all_(all) {}
  void Add(int64_t, std::span<const int32_t> ids) override {
    all_->insert(all_->end(), ids.begin(), ids.end());
  }

 private:
  std::vector<int32_t>* all_;
};

/// The experts of the layer, and the MLP next to them if there is one.
Status RunSparse(Pass& pass) {
  if (pass.layer(0).has_both()) return RunBeside(pass, 0);
  MARLIN_RETURN_IF_ERROR(RunRoute(pass, 0));
  return RunExperts(pass, 0);
}

}  // namespace

LayerRun::LayerRun(const Device& device, const DecoderConfig& config, const Checkpoint& checkpoint)
    : device_(device),
      decoder_{config, checkpoint, {}, {}, {}, {}, {}, {}, {}, {}, 0, 0},
      arena_(device) {
  decoder_.layers.emplace_back();
}

Result<std::unique_ptr<LayerRun>> LayerRun::Make(const Device& device, const DecoderConfig& config,
                                                 const Checkpoint& checkpoint, int64_t layer) {
  std::unique_ptr<LayerRun> run(new LayerRun(device, config, checkpoint));
  DecoderConfig& own = run->decoder_.config;
  own.layers = {config.layer(layer)};
  if (int64_t& source = own.layers.front().sizes.kv_source; source >= 0) {
    own.layers.push_back(config.layer(source));
    own.layers.front().sizes.kv_source = 1;
    run->decoder_.layers.emplace_back();
  }
  MARLIN_RETURN_IF_ERROR(UploadTables(device, &run->decoder_));
  CacheShape shape = CacheShape::Of(own, DType::kF32);
  // Passes have the pages of a state, also where the layer keeps none.
  if (shape.layers.front() == LayerState()) shape.layers.front().kept = {1, 1, 1};
  MARLIN_ASSIGN_OR_RETURN(run->pool_, PagePool::Make(device, shape));
  return run;
}

Status LayerRun::Load(const LayerSource& source, int64_t layer, Half half, bool matrices) {
  const bool attention = half == Half::kAttention;
  MARLIN_ASSIGN_OR_RETURN(DecoderLayer loaded,
                          source.Layer(layer, {attention, !attention, matrices}));
  DecoderLayer& own = decoder_.layers.front();
  if (attention) {
    own.input_norm = std::move(loaded.input_norm);
    own.mixer = std::move(loaded.mixer);
    own.attention_out_norm = std::move(loaded.attention_out_norm);
  } else {
    own.mlp_norm = std::move(loaded.mlp_norm);
    own.mlp = std::move(loaded.mlp);
    own.experts = std::move(loaded.experts);
    own.beside_out_norm = std::move(loaded.beside_out_norm);
    own.mlp_out_norm = std::move(loaded.mlp_out_norm);
    own.embedding_gate = std::move(loaded.embedding_gate);
    own.embedding_projection = std::move(loaded.embedding_projection);
    own.embedding_norm = std::move(loaded.embedding_norm);
    own.scale = loaded.scale;
  }
  return {};
}

HostRows SelectRows(const HostRows& all, std::span<const int64_t> tokens) {
  HostRows rows;
  rows.width = all.width;
  rows.values.reserve(tokens.size() * static_cast<size_t>(all.width));
  for (const int64_t token : tokens) {
    const auto first = all.values.begin() + token * all.width;
    rows.values.insert(rows.values.end(), first, first + all.width);
  }
  return rows;
}

std::vector<std::vector<int64_t>> TokensByExpert(std::span<const int32_t> ids, int64_t top_k,
                                                 int64_t experts) {
  std::vector<std::vector<int64_t>> tokens(static_cast<size_t>(experts));
  for (size_t i = 0; i < ids.size(); ++i) {
    tokens[static_cast<size_t>(ids[i])].push_back(static_cast<int64_t>(i) / top_k);
  }
  return tokens;
}

Status LayerRun::RunPass(const WindowChunk& chunk, const float* hidden,
                         FunctionRef<Status(Pass&)> body) {
  const ArenaScope scope(arena_);
  std::vector<std::unique_ptr<KvCache>> caches;
  std::vector<int32_t> positions;
  std::vector<int32_t> first_rows = {0};
  std::vector<std::span<const int32_t>> rows;
  size_t blocks = 0;
  for (const int64_t window : chunk.windows) {
    caches.push_back(std::make_unique<KvCache>(pool_, true));
    MARLIN_RETURN_IF_ERROR(caches.back()->Reserve(0, window));
    rows.push_back(caches.back()->TableFrom(0, 0));
    blocks = std::max(blocks, rows.back().size());
    for (int64_t i = 0; i < window; ++i) positions.push_back(static_cast<int32_t>(i));
    first_rows.push_back(static_cast<int32_t>(positions.size()));
  }
  std::vector<int32_t> tables;
  for (const std::span<const int32_t> row : rows) {
    tables.insert(tables.end(), row.begin(), row.end());
    tables.resize(tables.size() + blocks - row.size(), -1);
  }
  Pass pass{device_, decoder_, *pool_, ExactProducts(), arena_};
  StepValues& values = pass.values;
  MARLIN_ASSIGN_OR_RETURN(values.positions, arena_.Upload(positions));
  MARLIN_ASSIGN_OR_RETURN(values.first_rows, arena_.Upload(first_rows));
  MARLIN_ASSIGN_OR_RETURN(const TensorView table, arena_.Upload(tables));
  const auto sequences = static_cast<int64_t>(caches.size());
  values.pages.push_back({pool_->Slabs(0), TensorView(table.data(), DType::kI32,
                                                      {sequences, static_cast<int64_t>(blocks)})});
  MARLIN_RETURN_IF_ERROR(TakeValues(&pass));
  MARLIN_RETURN_IF_ERROR(arena_.Fill(values.hidden, hidden));
  const Status status = body(pass);
  // Even after an error, no work may still use the arena or the pages.
  Status finished = device_.Synchronize();
  MARLIN_RETURN_IF_ERROR(status);
  return finished;
}

Status LayerRun::Fetch(const TensorView& view, HostRows* rows) {
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  rows->width = view.dim(view.rank() - 1);
  rows->values.resize(static_cast<size_t>(view.ElementCount()));
  return arena_.Download(view, rows->values.data());
}

Status LayerRun::RunSource(Pass& pass, const WindowChunk& chunk, const float* hidden) {
  if (decoder_.layers.size() == 1) return {};
  const int64_t width = pass.values.hidden.dim(1);
  MARLIN_RETURN_IF_ERROR(arena_.Fill(pass.values.hidden, extras_.source + chunk.first * width));
  MARLIN_RETURN_IF_ERROR(RunMixer(pass, 1));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  return arena_.Fill(pass.values.hidden, hidden);
}

Status LayerRun::AddEmbedding(Pass& pass, const WindowChunk& chunk) {
  if (extras_.embeddings == nullptr) return {};
  const int64_t features = layer().embedding_gate.out;
  MARLIN_ASSIGN_OR_RETURN(pass.layer_embeddings, arena_.Take(DType::kF32, {chunk.rows, features}));
  MARLIN_RETURN_IF_ERROR(
      arena_.Fill(pass.layer_embeddings, extras_.embeddings + chunk.first * features));
  return RunAddEmbedding(pass, 0);
}

Status LayerRun::EndHalf(Pass& pass, Half half, const WindowChunk& chunk, float* hidden) {
  MARLIN_RETURN_IF_ERROR(RunProjectAdd(pass, 0, half == Half::kMlp));
  if (half == Half::kMlp) MARLIN_RETURN_IF_ERROR(AddEmbedding(pass, chunk));
  return DownloadHidden(pass, hidden);
}

Status LayerRun::DownloadHidden(Pass& pass, float* hidden) {
  MARLIN_RETURN_IF_ERROR(CompleteHidden(pass));
  MARLIN_RETURN_IF_ERROR(device_.Synchronize());
  return arena_.Download(pass.values.hidden, hidden);
}

Status LayerRun::Attend(Pass& pass, Depth depth, InputRows* inputs) {
  const auto fetch = [this](const TensorView& view, HostRows* rows) { return Fetch(view, rows); };
  InnerInputs observer(pass, fetch, inputs);
  if (inputs != nullptr) pass.inputs = &observer;
  return RunMixer(pass, 0, depth == Depth::kInner);
}

Status LayerRun::FetchNormed(Pass& pass, Half half, InputRows* inputs) {
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          arena_.Take(DType::kF32, pass.values.hidden.shape()));
  const auto fetch = [&](const DeviceVector& norm, InputSlot slot) -> Status {
    MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, norm, x));
    return Fetch(x, &(*inputs)[slot]);
  };
  if (half == Half::kAttention) return fetch(layer().input_norm, kNormedSlot);
  MARLIN_RETURN_IF_ERROR(fetch(layer().mlp_norm, kNormedSlot));
  const ExpertsLayer& experts = layer().experts;
  if (!experts.router_norm.empty()) {
    MARLIN_RETURN_IF_ERROR(fetch(experts.router_norm, kRouterSlot));
  }
  return experts.norm.empty() ? Status() : fetch(experts.norm, kExpertsSlot);
}

Status LayerRun::Run(Half half, const WindowChunk& chunk, Depth depth, float* hidden,
                     InputRows* inputs) {
  const bool attention = half == Half::kAttention;
  return RunPass(chunk, hidden, [&](Pass& pass) -> Status {
    if (depth == Depth::kNormed) return FetchNormed(pass, half, inputs);
    if (!attention && layer().experts.set.count() > 0 && depth == Depth::kAll) {
      MARLIN_RETURN_IF_ERROR(RunSparse(pass));
      MARLIN_RETURN_IF_ERROR(AddEmbedding(pass, chunk));
      return DownloadHidden(pass, hidden);
    }
    if (attention) MARLIN_RETURN_IF_ERROR(RunSource(pass, chunk, hidden));
    MARLIN_RETURN_IF_ERROR(attention ? Attend(pass, depth, inputs) : RunGateUp(pass, 0));
    if (depth == Depth::kInner) return {};
    const MutableTensorView& last = attention ? pass.values.mixed : pass.values.inner;
    if (inputs != nullptr) MARLIN_RETURN_IF_ERROR(Fetch(last, &(*inputs)[kLastSlot]));
    return depth == Depth::kLast ? Status() : EndHalf(pass, half, chunk, hidden);
  });
}

Status LayerRun::End(Half half, const WindowChunk& chunk, const HostRows& last, float* hidden) {
  return RunPass(chunk, hidden, [&](Pass& pass) -> Status {
    const bool attention = half == Half::kAttention;
    const MutableTensorView& to = attention ? pass.values.mixed : pass.values.inner;
    MARLIN_RETURN_IF_ERROR(arena_.Fill(to, last.values.data()));
    return EndHalf(pass, half, chunk, hidden);
  });
}

Status LayerRun::Route(const WindowChunk& chunk, float* hidden, std::vector<int32_t>* ids,
                       std::vector<float>* weights) {
  Selections selections(ids);
  return RunPass(chunk, hidden, [&](Pass& pass) -> Status {
    pass.routing = &selections;
    MARLIN_RETURN_IF_ERROR(RunRoute(pass, 0));
    HostRows own;
    MARLIN_RETURN_IF_ERROR(Fetch(pass.values.expert_weights, &own));
    weights->insert(weights->end(), own.values.begin(), own.values.end());
    return {};
  });
}

Result<HostRows> LayerRun::Gate(const MlpLayer& mlp, const HostRows& x) {
  HostRows inner;
  inner.width = mlp.down.in;
  inner.values.resize(static_cast<size_t>(x.rows() * inner.width));
  const Pass pass{device_, decoder_, *pool_, ExactProducts(), arena_};
  for (int64_t first = 0; first < x.rows(); first += kPassTokens) {
    const int64_t rows = std::min(kPassTokens, x.rows() - first);
    const ArenaScope scope(arena_);
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView in, arena_.Take(DType::kF32, {rows, x.width}));
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView out,
                            arena_.Take(DType::kF32, {rows, inner.width}));
    MARLIN_RETURN_IF_ERROR(arena_.Fill(in, x.values.data() + first * x.width));
    const Status status = RunGate(pass, mlp, in, out);
    MARLIN_RETURN_IF_ERROR(device_.Synchronize());
    MARLIN_RETURN_IF_ERROR(status);
    MARLIN_RETURN_IF_ERROR(arena_.Download(out, inner.values.data() + first * inner.width));
  }
  return inner;
}

}  // namespace marlin
