// Linear maps as the GEMMs of the persistent kernel's phases.
#pragma once

#include <cstddef>
#include <optional>

#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/persistent/persistent_layout.h"
#include "plan/gemm/kernel_desc.h"
#include "plan/step/decoder_step.h"

namespace marlin::cuda {

/// Whether tiles of two matrices are read alike.
bool SameTiles(const TileView& a, const TileView& b);

/// Finds the tiles of a model's weights. Methods say why the kernel does not read what they were
/// given.
class PersistentGemms {
 public:
  /// A linear map of one part, or of two equal ones: gate and up.
  Support Add(const StepLinear& linear, size_t most_parts, PhaseGemm* gemm);
  /// Two linear maps of the same inputs, of one part each, that may have different outputs.
  Support AddPair(const StepLinear& first, const StepLinear& second, PhaseGemm* gemm);
  /// The two products of a gated MLP.
  Support AddGated(const StepMlp& mlp, PhaseGemm* gates, PhaseGemm* down);

  /// Whether a part is where the first weights are.
  bool IsOnDevice(const PreparedWeights& part) const;
  /// The kind of all tiles. Precondition: some were found.
  CodeKind kind() const { return *kind_; }

 private:
  /// The tiles of a part, if they are of the kind of all.
  Support TakeTiles(const PreparedWeights& part, TileView* tiles);

  const void* backend_ = nullptr;  ///< The one that prepared the first weights.
  std::optional<CodeKind> kind_;
};

}  // namespace marlin::cuda
