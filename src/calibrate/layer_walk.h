// Runs a decoder over a text, layer by layer, and shows the inputs of its matrices.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "calibrate/layer_run.h"
#include "calibrate/matrix_inputs.h"
#include "marlin/device.h"
#include "model/layers.h"
#include "model/open_model.h"

namespace marlin {

/// Takes the rows of one input.
class InputSink {
 public:
  virtual ~InputSink() = default;
  /// Further rows [tokens, k] in the order of the text: of the original model, and of the model
  /// with replaced matrices; the same object in a walk over one model.
  virtual Status Add(const HostRows& original, const HostRows& current) = 0;
  /// After the last rows. In a walk over two models, the input's matrices that are replaced here
  /// take effect before the walk goes on.
  virtual Status End() = 0;
};

/// An expert, or the shared ones, and some tokens of a layer. Refers to a walk that goes on later.
class ExpertVisit {
 public:
  ExpertVisit(int64_t layer, const ExpertMatrices& matrices, std::span<LayerRun* const> runs,
              const LayerSource& source, std::span<const HostRows> normed,
              std::vector<int64_t> tokens, bool last)
      : layer_(layer),
        matrices_(matrices),
        runs_(runs),
        source_(source),
        normed_(normed),
        tokens_(std::move(tokens)),
        last_(last) {}

  int64_t layer() const { return layer_; }
  /// Outlives the visits of the layer.
  const ExpertMatrices& matrices() const { return matrices_; }
  bool shared() const { return matrices_.expert < 0; }
  /// Normalized hidden states [tokens, hidden] of all tokens, as InputSink::Add gets them.
  const HostRows& original() const { return normed_.front(); }
  const HostRows& current() const { return normed_.back(); }
  /// The tokens that select the expert; none for the shared ones, which get all.
  std::span<const int64_t> tokens() const { return tokens_; }
  /// Whether no other tokens follow in this layer.
  bool last() const { return last_; }

  /// The inputs of down [rows, width] for rows of the expert's input.
  Result<HostRows> OriginalInner(const HostRows& x) const { return Inner(*runs_.front(), x); }
  Result<HostRows> CurrentInner(const HostRows& x) const;
  /// Loads the expert, not a shared one, with its replaced matrices, for CurrentInner.
  Status Reload();

 private:
  Result<HostRows> Inner(LayerRun& run, const HostRows& x) const;

  int64_t layer_;
  const ExpertMatrices& matrices_;
  std::span<LayerRun* const> runs_;
  const LayerSource& source_;
  std::span<const HostRows> normed_;
  std::vector<int64_t> tokens_;
  bool last_;
  std::unique_ptr<const MlpLayer> reloaded_;
};

/// What a method does with the inputs of a walk.
class InputVisitor {
 public:
  virtual ~InputVisitor() = default;
  /// What takes the rows of an input, which outlives it. Null: they are not needed.
  virtual std::unique_ptr<InputSink> SinkFor(const MatrixInput& input) = 0;
  /// The inputs of an expert's matrices. For every group of tokens the shared experts are visited
  /// first and then all others, also those that no token selects.
  virtual Status VisitExpert(ExpertVisit& visit) = 0;
};

/// What a walk does besides showing inputs.
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

  /// Looks up the embeddings of windows, which run in passes of at most `pass_tokens`. Errors:
  /// those of DecoderEnds.
  Status Start(std::span<const std::vector<int32_t>> texts, int64_t pass_tokens);
  int64_t tokens() const { return tokens_; }
  bool started() const { return tokens_ > 0; }
  const LayerSource& source() const { return original_source_; }

  /// Runs the next layer, 0 at first. Errors: those of LayerSource, of the layer's operations and
  /// of the visitor.
  Status RunLayer(int64_t layer, InputVisitor& visitor);
  /// Shows the head's input, after the last layer; nothing if the head shares the embedding's
  /// table.
  Status RunHead(InputVisitor& visitor);
  /// All layers and the head; `progress`, unless empty, counts layers.
  Status RunAll(InputVisitor& visitor, const Progress& progress);

 private:
  bool two() const { return hidden_.size() > 1; }
  float* Rows(size_t model, const WindowChunk& chunk) {
    return hidden_[model].data() + chunk.first * directory_.config.shape.hidden;
  }
  Status RunHalf(Half half, std::span<const MatrixInput> inputs, InputVisitor& visitor);
  /// Runs to the depth at which some inputs are known.
  Status RunStage(Half half, LayerRun::Depth depth, std::span<const MatrixInput> inputs,
                  InputVisitor& visitor);
  Status RunExperts(const LayerInputs& inputs, InputVisitor& visitor);
  /// The normalized hidden states of some passes, of every model.
  Result<std::vector<HostRows>> Normalize(std::span<const WindowChunk> chunks);
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
};

}  // namespace marlin
