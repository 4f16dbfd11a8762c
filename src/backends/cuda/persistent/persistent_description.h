// A model's layers as the persistent kernel reads them.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/persistent/persistent_gemms.h"
#include "backends/cuda/persistent/persistent_layout.h"
#include "backends/cuda/persistent/persistent_plan.h"
#include "backends/cuda/weights/prepared_tiles.h"

namespace marlin::cuda {

/// Collects layers. Methods say why the kernel does not run what they were given; the description
/// is of no use then, unless that was the projections that a run ends with.
class PersistentDescription {
 public:
  /// `blocks`: the CTAs of a launch.
  explicit PersistentDescription(int blocks) : blocks_(blocks) {}

  Support AddLayer(const LayerSteps& steps, int64_t hidden);
  /// Requests what the next layer's latent attention and output projection read. `operations`: the
  /// ones after the layers.
  void AddAhead(std::span<const StepOperation> operations);

  /// Precondition: a layer was added.
  CodeKind kind() const { return gemms_.kind(); }
  const PersistentArguments& shape() const { return shape_; }
  const std::vector<PersistentLayer>& layers() const { return layers_; }
  /// The experts of all layers, in the layers' order.
  const std::vector<PersistentExpert>& experts() const { return experts_; }
  /// Matrices whose rows are read in fp32, one after another: of every router, the shared expert's
  /// gate after it; and of every gated delta net's writes and decays.
  const std::vector<const PreparedTiles*>& routers() const { return routers_; }
  const std::vector<const PreparedTiles*>& delta_rows() const { return delta_rows_; }

 private:
  Support AddProjections(const LatentProjectStep& step);
  Support AddMixer(const LayerSteps& steps, PersistentLayer* layer);
  void AddAttention(const LayerSteps& steps, PersistentLayer* layer);
  Support AddDelta(const GatedDeltaStep& step, PersistentLayer* layer);
  Support SetDelta(const GatedDeltaStep& step);
  Support SetAttention(const AttentionStep& step, int64_t hidden);
  Support SetGate(const GateOptions& gate);
  void TakeGeneralForm();
  void AddAheadRange(const void* data, int64_t bytes);
  Support SetRouter(const RouterOptions& options, const ExpertsStep& step);
  Support AddMlp(const LayerSteps& steps, PersistentLayer* layer);
  Support AddExperts(const LayerSteps& steps, PersistentLayer* layer);
  Support AddShared(const ExpertsStep& step, PhaseGemm* gates, PhaseGemm* down);

  const int blocks_;
  PersistentGemms gemms_;
  PersistentArguments shape_;
  int ahead_ = 0;  ///< Ranges of the shape's.
  int64_t ahead_bytes_ = 0;
  std::array<std::optional<int>, kMostCacheGroups> windows_;
  std::vector<PersistentLayer> layers_;
  std::vector<PersistentExpert> experts_;
  std::vector<const PreparedTiles*> routers_;
  std::vector<const PreparedTiles*> delta_rows_;
};

}  // namespace marlin::cuda
