// The host's part of the persistent kernel: which layers it runs, how phases are split among the
// CTAs, and where everything is in shared memory and in the exchange buffers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backends/cuda/persistent/persistent_layout.h"
#include "plan/gemm/kernel_desc.h"
#include "plan/step/decoder_step.h"

namespace marlin::cuda {

/// A layer's operations: attention or a gated delta net; gate_up and down, or route and experts.
struct LayerSteps {
  const ProjectStep* project = nullptr;
  const LatentProjectStep* latent = nullptr;
  const AttentionStep* attention = nullptr;
  const GatedDeltaStep* delta = nullptr;
  const ProjectAddStep* out = nullptr;
  const GateUpStep* gate_up = nullptr;
  const ProjectAddStep* down = nullptr;
  const RouteStep* route = nullptr;
  const ExpertsStep* experts = nullptr;
  size_t count = 0;  ///< Its operations.

  bool hybrid = false;   ///< For the hybrid kernel.
  bool between = false;  ///< For the kernel between attentions.

  /// Nothing comes after the projections.
  bool ends() const { return out == nullptr; }
};

/// The layer that a run of operations begins with, if it does.
std::optional<LayerSteps> TakeLayer(std::span<const StepOperation> operations);

/// The same in a model with gated delta nets. Attention that the kernel lacks runs elsewhere: the
/// first layer of a run may begin with its output projection, and a later one end with the
/// projections before it.
std::optional<LayerSteps> TakeHybridLayer(std::span<const StepOperation> operations, bool first);

/// The same in a model whose attention runs elsewhere: what comes after the first layer's, or the
/// projections of the next layer's latent attention.
std::optional<LayerSteps> TakeLayerBetween(std::span<const StepOperation> operations, bool first);

/// Experts as wide as the layer's that its shared expert makes; 0: there is none. Precondition:
/// SupportsLayer.
int SharedParts(const ExpertsStep& step);

/// Whether the kernel runs a layer of a model with `hidden` features, apart from how its weights
/// are stored.
Support SupportsLayer(const LayerSteps& steps, int64_t hidden);

/// Chooses the splits of a phase whose other fields are set, and fills in what follows from them.
void SplitPhase(Phase phase, int blocks, PhaseGemm* gemm);

/// The same for all phases of a layer with `rows`, whose single row's splits are chosen.
void SplitRows(int rows, const PersistentRouter& router, int blocks, PersistentLayer* layer);

/// The CTAs' parts of a phase.
struct BlockSchedule {
  Schedule header;
  std::vector<ScheduledUnit> units;
  std::vector<ScheduledTile> tiles;
};
/// The part of CTA `block` of `blocks`. Precondition: no more units than kMostUnits, or than
/// kMostRowUnits with several rows.
BlockSchedule ScheduleBlock(const PhaseGemm& gemm, int block, int blocks, int rows = 1);

/// The schedules of all phases of all layers, [blocks][bytes]; sets the offsets of the layers'.
struct Schedules {
  std::vector<uint8_t> data;
  int bytes = 0;  ///< Per CTA.
  int span = 1;   ///< The most k-tiles whose activations a CTA gathers.
};
Schedules ScheduleLayers(std::span<PersistentLayer> layers, int blocks, int rows = 1);

/// Fills in everything that follows from a shape and its layers, on a device of `blocks`
/// multiprocessors with `shared_bytes` each. Nothing, if that does not fit.
std::optional<PersistentArguments> LayOutPersistent(const PersistentArguments& shape,
                                                    std::span<const PersistentLayer> layers,
                                                    const Schedules& schedules, int blocks,
                                                    int shared_bytes);

/// The sizes on which the words of a run's launches depend: runs with the same key may have the
/// same exchange buffers, because each writes all words that any of them writes. Empty: the run has
/// its own.
std::vector<int> ExchangeKey(const PersistentArguments& args,
                             std::span<const PersistentLayer> layers);

}  // namespace marlin::cuda
