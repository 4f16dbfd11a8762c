// Runs a decoder over a text, layer by layer, and shows the inputs of its matrices.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "calibrate/layer_run.h"
#include "calibrate/matrix_inputs.h"
#include "calibrate/walk_extras.h"
#include "marlin/device.h"
#include "model/layers.h"
#include "model/open_model.h"

namespace marlin {

/// A receiver of the rows of one input; without `add` the walk does not collect them.
struct InputSink {
  /// Takes further rows [tokens, k] in the order of the text: of the original model, and of the
  /// model with replaced matrices; the same object in a walk over one model.
  std::function<Status(const HostRows& original, const HostRows& current)> add;
  /// Called after the last rows. In a walk over two models, the input's matrices that are replaced
  /// here take effect before the walk goes on.
  std::function<Status()> end;
};

/// An expert, or the shared ones, and tokens of a layer.
struct ExpertVisit {
  int64_t layer;
  const ExpertMatrices& matrices;  ///< Valid until the layer ends.
  /// The expert's inputs for all tokens, [tokens, hidden]: the normalized hidden states as
  /// InputSink::add gets them, or where the family scales experts' inputs those times the weights.
  const HostRows& original;
  const HostRows& current;
  /// The tokens that select the expert; none for the shared ones, which get all.
  std::vector<int64_t> tokens;
  bool last;  ///< No further tokens follow in this layer.

  bool shared() const { return matrices.expert < 0; }
};

/// A method that learns from the inputs of a walk.
class InputVisitor {
 public:
  virtual ~InputVisitor() = default;
  /// The input outlives what is returned.
  virtual InputSink SinkFor(const MatrixInput& input) = 0;
  /// Called, for every group of tokens, for the shared experts first and then for every other one,
  /// selected or not. Errors: the walk's.
  virtual Status VisitExpert(const ExpertVisit& visit) = 0;
};

/// Options of a walk.
struct WalkOptions {
  /// Runs a second model with these matrices in the place of the original's. Every input's are
  /// loaded when its sink has ended; what follows is computed with them.
  const ReplacedMatrices* replaced = nullptr;
  /// Experts see the tokens of one pass at a time; otherwise all of them.
  bool experts_by_pass = false;
};

/// Hidden states of a text that run through the layers of a model, or of two side by side.
class LayerWalk {
 public:
  /// `directory` and what the options refer to must outlive this.
  LayerWalk(const ModelDirectory& directory, const Device& device, const WalkOptions& options);

  /// Looks up the embeddings of windows, which run in passes of at most `pass_tokens`. Errors: as
  /// DecoderEnds::Embed.
  Status Start(std::span<const std::vector<int32_t>> texts, int64_t pass_tokens);
  int64_t tokens() const { return tokens_; }
  const LayerSource& source() const { return original_source_; }

  /// Runs the next layer, beginning with 0. Errors: those of LayerSource, of the layer's operations
  /// and of the visitor.
  Status RunLayer(int64_t layer, InputVisitor& visitor);
  /// Shows the head's input, after the last layer; nothing if the head shares the embedding's
  /// table.
  Status RunHead(InputVisitor& visitor);
  /// All layers and the head; `progress`, unless empty, counts layers.
  Status RunAll(InputVisitor& visitor, const Progress& progress);

  /// During VisitExpert: the inputs of the down projection [rows, width] for rows of the expert's
  /// own input, in the original model and in the one with replaced matrices.
  Result<HostRows> OriginalInner(const ExpertVisit& visit, const HostRows& x);
  Result<HostRows> CurrentInner(const ExpertVisit& visit, const HostRows& x);
  /// During VisitExpert, not for the shared ones: loads the expert's matrices that have been
  /// replaced, for CurrentInner.
  Status ReloadExpert(const ExpertVisit& visit);

 private:
  bool two() const { return hidden_.size() > 1; }
  float* Rows(size_t model, const WindowChunk& chunk) {
    return hidden_[model].data() + chunk.first * directory_.config.shape.hidden;
  }
  Status RunHalf(Half half, std::span<const MatrixInput> inputs, InputVisitor& visitor);
  /// Runs to the depth at which some inputs are known.
  Status RunStage(Half half, LayerRun::Depth depth, std::span<const MatrixInput> inputs,
                  InputVisitor& visitor);
  /// Both halves of a layer, from the same hidden states.
  Status RunParallel(const LayerInputs& inputs, InputVisitor& visitor);
  Status RunExperts(const LayerInputs& inputs, InputVisitor& visitor);
  /// The inputs of an MLP next to experts, and of their router.
  Status RunBeside(std::span<const MatrixInput> inputs, InputVisitor& visitor);
  /// Runs the second half of the current layer in one of the models.
  Status RunMlp(size_t model, std::span<const WindowChunk> chunks);
  /// The normalized hidden states of some passes, of every model.
  Result<std::vector<HostRows>> Normalize(std::span<const WindowChunk> chunks, InputSlot slot);
  Status VisitExperts(const LayerInputs& inputs, std::span<const WindowChunk> chunks,
                      std::span<const HostRows> normed, bool last, InputVisitor& visitor);
  /// With two models, loads what has been replaced.
  Status Reload(Half half);

  const ModelDirectory& directory_;
  Device device_;
  WalkOptions options_;
  LayerSource original_source_;
  LayerSource current_source_;
  std::vector<WindowChunk> chunks_;
  int64_t tokens_ = 0;
  int64_t layer_ = 0;
  std::vector<std::vector<float>> hidden_;  ///< By model, [tokens, hidden]; the original is first.
  std::vector<std::unique_ptr<LayerRun>> runs_;
  WalkExtras extras_;
  std::optional<MlpLayer> reloaded_;  ///< The visited expert, if it was reloaded.
};

}  // namespace marlin
