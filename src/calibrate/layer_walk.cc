#include "calibrate/layer_walk.h"

#include <utility>

#include "base/macros.h"
#include "calibrate/calibration_text.h"
#include "calibrate/decoder_ends.h"
#include "checkpoint/checkpoint_impl.h"
#include "model/placement.h"

namespace marlin {
namespace {

using Depth = LayerRun::Depth;

/// Memory for rows of the second model that wait until their matrix is replaced.
constexpr int64_t kKeptBytes = int64_t{256} << 20;

/// The inputs of a half's last matrix while it is replaced, so that the half can end from them
/// instead of running again. Keeps as many chunks as fit; none if the device has its own memory,
/// because running again is then faster than copying the rows there.
class KeptRows {
 public:
  KeptRows(const Device& device, size_t chunks)
      : rows_(chunks), most_bytes_(ReadsHostMemory(device) ? kKeptBytes : 0) {}

  void Offer(size_t chunk, HostRows&& rows) {
    bytes_ += static_cast<int64_t>(rows.values.size() * sizeof(float));
    if (bytes_ <= most_bytes_) rows_[chunk] = std::move(rows);
  }
  /// Null: not kept.
  const HostRows* Find(size_t chunk) const {
    return rows_[chunk].values.empty() ? nullptr : &rows_[chunk];
  }

 private:
  std::vector<HostRows> rows_;
  int64_t most_bytes_;
  int64_t bytes_ = 0;  ///< All rows offered.
};

/// The inputs of an expert's, or the shared ones', down projection.
Result<HostRows> Inner(LayerRun& run, int64_t expert, const HostRows& x) {
  const ExpertsLayer& layer = run.layer().experts;
  return run.Gate(expert < 0 ? layer.shared : layer.experts[static_cast<size_t>(expert)], x);
}

/// Multiplies rows by their factors.
void ScaleRows(std::span<const float> factors, HostRows* rows) {
  const auto width = static_cast<size_t>(rows->width);
  for (size_t i = 0; i < rows->values.size(); ++i) rows->values[i] *= factors[i / width];
}

/// Gives the sinks the rows of their inputs in the original and in the current model.
Status OfferRows(std::span<const MatrixInput> inputs, std::span<const InputSink> sinks,
                 InputRows& original, InputRows& current) {
  for (size_t i = 0; i < sinks.size(); ++i) {
    const size_t slot = inputs[i].slot;
    if (sinks[i].add) MARLIN_RETURN_IF_ERROR(sinks[i].add(original[slot], current[slot]));
  }
  return {};
}

}  // namespace

LayerWalk::LayerWalk(const ModelDirectory& directory, const Device& device,
                     const WalkOptions& options)
    : directory_(directory),
      device_(device),
      options_(options),
      original_source_(directory_.checkpoint, directory_.config, device_, nullptr),
      current_source_(directory_.checkpoint, directory_.config, device_, options.replaced) {}

Status LayerWalk::Start(std::span<const std::vector<int32_t>> texts, int64_t pass_tokens) {
  chunks_ = ChunksOf(texts, pass_tokens);
  tokens_ = chunks_.back().first + chunks_.back().rows;
  MARLIN_ASSIGN_OR_RETURN(auto ends, DecoderEnds::Make(device_, original_source_));
  std::vector<float> hidden(static_cast<size_t>(tokens_ * directory_.config.shape.hidden));
  MARLIN_RETURN_IF_ERROR(ends->Embed(texts, chunks_, hidden.data()));
  if (options_.replaced != nullptr) hidden_.push_back(hidden);
  hidden_.push_back(std::move(hidden));
  extras_.Start(directory_.config, std::move(ends), texts, tokens_);
  return {};
}

Status LayerWalk::RunLayer(int64_t layer, InputVisitor& visitor) {
  layer_ = layer;
  runs_.clear();
  CheckpointAccess::Get(directory_.checkpoint).ForgetComputed();
  for (size_t model = 0; model < hidden_.size(); ++model) {
    MARLIN_ASSIGN_OR_RETURN(
        std::unique_ptr<LayerRun> run,
        LayerRun::Make(device_, directory_.config, directory_.checkpoint, layer));
    // The second model's matrices are loaded as they become known (Reload).
    const bool matrices = model == 0;
    for (const Half half : kHalves) {
      MARLIN_RETURN_IF_ERROR(run->Load(original_source_, layer, half, matrices));
    }
    runs_.push_back(std::move(run));
  }
  MARLIN_RETURN_IF_ERROR(extras_.Begin(directory_.config, layer, chunks_, hidden_, runs_));
  const LayerInputs inputs =
      DescribeInputs(directory_.config, layer, original_source_.Tensors(layer));
  if (directory_.config.family->parallel) return RunParallel(inputs, visitor);
  if (!inputs.attention.empty()) {
    MARLIN_RETURN_IF_ERROR(RunHalf(Half::kAttention, inputs.attention, visitor));
  }
  if (!inputs.mlp.empty()) {
    MARLIN_RETURN_IF_ERROR(inputs.experts.empty() ? RunHalf(Half::kMlp, inputs.mlp, visitor)
                                                  : RunExperts(inputs, visitor));
  }
  extras_.End(directory_.config, layer, runs_);
  return {};
}

Status LayerWalk::RunParallel(const LayerInputs& inputs, InputVisitor& visitor) {
  const std::vector<std::vector<float>> before = hidden_;
  MARLIN_RETURN_IF_ERROR(RunHalf(Half::kAttention, inputs.attention, visitor));
  std::vector<std::vector<float>> added = std::exchange(hidden_, before);
  for (size_t model = 0; model < added.size(); ++model) {
    for (size_t i = 0; i < added[model].size(); ++i) added[model][i] -= before[model][i];
  }
  MARLIN_RETURN_IF_ERROR(RunHalf(Half::kMlp, inputs.mlp, visitor));
  for (size_t model = 0; model < added.size(); ++model) {
    for (size_t i = 0; i < added[model].size(); ++i) hidden_[model][i] += added[model][i];
  }
  return {};
}

Status LayerWalk::Reload(Half half) {
  return two() ? runs_.back()->Load(current_source_, layer_, half) : Status();
}

Status LayerWalk::RunHalf(Half half, std::span<const MatrixInput> inputs, InputVisitor& visitor) {
  if (inputs.front().slot == kNormedSlot) {
    MARLIN_RETURN_IF_ERROR(RunStage(half, Depth::kNormed, inputs.first(1), visitor));
    inputs = inputs.subspan(1);
  } else {
    MARLIN_RETURN_IF_ERROR(Reload(half));  // As the end of a stage does.
  }
  if (two() && inputs.size() > 1) {
    MARLIN_RETURN_IF_ERROR(RunStage(half, Depth::kInner, inputs.first(inputs.size() - 1), visitor));
    inputs = inputs.last(1);
  }
  return RunStage(half, Depth::kAll, inputs, visitor);
}

Status LayerWalk::RunStage(Half half, Depth depth, std::span<const MatrixInput> inputs,
                           InputVisitor& visitor) {
  std::vector<InputSink> sinks;
  for (const MatrixInput& input : inputs) sinks.push_back(visitor.SinkFor(input));
  const bool waits = two() && depth == Depth::kAll;  // The second model, for the last matrix.
  KeptRows kept(device_, chunks_.size());
  std::vector<InputRows> rows(runs_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) {
    for (size_t model = 0; model < runs_.size(); ++model) {
      const Depth own = waits && model > 0 ? Depth::kLast : depth;
      MARLIN_RETURN_IF_ERROR(
          runs_[model]->Run(half, chunks_[i], own, Rows(model, chunks_[i]), &rows[model]));
    }
    MARLIN_RETURN_IF_ERROR(OfferRows(inputs, sinks, rows.front(), rows.back()));
    if (waits) kept.Offer(i, std::move(rows.back()[kLastSlot]));
  }
  for (InputSink& sink : sinks) {
    if (sink.add) MARLIN_RETURN_IF_ERROR(sink.end());
    sink = {};
  }
  MARLIN_RETURN_IF_ERROR(Reload(half));
  for (size_t i = 0; waits && i < chunks_.size(); ++i) {
    float* const hidden = Rows(1, chunks_[i]);
    const HostRows* const last = kept.Find(i);
    MARLIN_RETURN_IF_ERROR(last != nullptr
                               ? runs_[1]->End(half, chunks_[i], *last, hidden)
                               : runs_[1]->Run(half, chunks_[i], Depth::kAll, hidden, nullptr));
  }
  return {};
}

Status LayerWalk::RunBeside(std::span<const MatrixInput> inputs, InputVisitor& visitor) {
  if (inputs.empty()) return {};
  MARLIN_RETURN_IF_ERROR(RunStage(Half::kMlp, Depth::kNormed, inputs.first(2), visitor));
  return RunStage(Half::kMlp, Depth::kLast, inputs.last(1), visitor);
}

Result<std::vector<HostRows>> LayerWalk::Normalize(std::span<const WindowChunk> chunks,
                                                   InputSlot slot) {
  std::vector<HostRows> all(runs_.size());
  for (size_t model = 0; model < runs_.size(); ++model) {
    InputRows rows;
    for (const WindowChunk& chunk : chunks) {
      MARLIN_RETURN_IF_ERROR(
          runs_[model]->Run(Half::kMlp, chunk, Depth::kNormed, Rows(model, chunk), &rows));
      const HostRows& normed = rows[slot];
      all[model].width = normed.width;
      all[model].values.insert(all[model].values.end(), normed.values.begin(), normed.values.end());
    }
  }
  return all;
}

Status LayerWalk::RunMlp(size_t model, std::span<const WindowChunk> chunks) {
  for (const WindowChunk& chunk : chunks) {
    MARLIN_RETURN_IF_ERROR(
        runs_[model]->Run(Half::kMlp, chunk, Depth::kAll, Rows(model, chunk), nullptr));
  }
  return {};
}

Status LayerWalk::RunExperts(const LayerInputs& inputs, InputVisitor& visitor) {
  MARLIN_RETURN_IF_ERROR(RunBeside(inputs.beside, visitor));
  const std::span<const WindowChunk> chunks = chunks_;
  const size_t passes = options_.experts_by_pass ? 1 : chunks.size();
  InputSink sink = visitor.SinkFor(inputs.mlp.front());
  for (size_t first = 0; first < chunks.size(); first += passes) {
    const std::span<const WindowChunk> group = chunks.subspan(first, passes);
    const bool last = first + passes == chunks.size();
    MARLIN_ASSIGN_OR_RETURN(const std::vector<HostRows> normed,
                            Normalize(group, inputs.mlp.front().slot));
    if (sink.add) MARLIN_RETURN_IF_ERROR(sink.add(normed.front(), normed.back()));
    if (sink.add && last) MARLIN_RETURN_IF_ERROR(sink.end());
    if (last) sink = {};
    MARLIN_RETURN_IF_ERROR(Reload(Half::kMlp));
    MARLIN_RETURN_IF_ERROR(VisitExperts(inputs, group, normed, last, visitor));
    MARLIN_RETURN_IF_ERROR(Reload(Half::kMlp));
    for (size_t model = 0; model < runs_.size(); ++model) {
      MARLIN_RETURN_IF_ERROR(RunMlp(model, group));
    }
  }
  return {};
}

Status LayerWalk::VisitExperts(const LayerInputs& inputs, std::span<const WindowChunk> chunks,
                               std::span<const HostRows> normed, bool last, InputVisitor& visitor) {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (const WindowChunk& chunk : chunks) {
    MARLIN_RETURN_IF_ERROR(
        runs_.back()->Route(chunk, Rows(runs_.size() - 1, chunk), &ids, &weights));
  }
  const bool scales = directory_.config.family->scales_expert_inputs;
  std::vector<HostRows> scaled;
  if (scales) {
    scaled.assign(normed.begin(), normed.end());
    for (HostRows& rows : scaled) ScaleRows(weights, &rows);
  }
  std::vector<std::vector<int64_t>> tokens =
      TokensByExpert(ids, directory_.config.router.top_k, directory_.config.shape.experts);
  for (const ExpertMatrices& matrices : inputs.experts) {
    const std::span<const HostRows> read =
        scales && matrices.expert >= 0 ? std::span<const HostRows>(scaled) : normed;
    ExpertVisit visit{layer_, matrices, read.front(), read.back(), {}, last};
    if (!visit.shared()) visit.tokens = std::move(tokens[static_cast<size_t>(matrices.expert)]);
    MARLIN_RETURN_IF_ERROR(visitor.VisitExpert(visit));
    reloaded_.reset();
  }
  return {};
}

Result<HostRows> LayerWalk::OriginalInner(const ExpertVisit& visit, const HostRows& x) {
  return Inner(*runs_.front(), visit.matrices.expert, x);
}

Result<HostRows> LayerWalk::CurrentInner(const ExpertVisit& visit, const HostRows& x) {
  return reloaded_ ? runs_.back()->Gate(*reloaded_, x)
                   : Inner(*runs_.back(), visit.matrices.expert, x);
}

Status LayerWalk::ReloadExpert(const ExpertVisit& visit) {
  MARLIN_ASSIGN_OR_RETURN(reloaded_, current_source_.Expert(layer_, visit.matrices.expert));
  return {};
}

Status LayerWalk::RunHead(InputVisitor& visitor) {
  if (directory_.config.shape.tied) return {};
  runs_.clear();
  MARLIN_ASSIGN_OR_RETURN(const auto ends, DecoderEnds::Make(device_, original_source_));
  const MatrixInput input = HeadInput(directory_.config);
  const InputSink sink = visitor.SinkFor(input);
  if (!sink.add) return {};
  for (const WindowChunk& chunk : chunks_) {
    std::vector<HostRows> normed;
    for (size_t model = 0; model < hidden_.size(); ++model) {
      MARLIN_ASSIGN_OR_RETURN(HostRows rows, ends->Normalize(chunk.rows, Rows(model, chunk)));
      normed.push_back(std::move(rows));
    }
    MARLIN_RETURN_IF_ERROR(sink.add(normed.front(), normed.back()));
  }
  return sink.end();
}

Status LayerWalk::RunAll(InputVisitor& visitor, const Progress& progress) {
  const int64_t layers = directory_.config.shape.layers;
  for (int64_t layer = 0; layer < layers; ++layer) {
    MARLIN_RETURN_IF_ERROR(RunLayer(layer, visitor));
    if (progress) progress(layer + 1, layers);
  }
  return RunHead(visitor);
}

}  // namespace marlin
