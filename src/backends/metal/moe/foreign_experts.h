// The experts of a layer for frameworks that own the memory and encode the launches, such as MLX: a
// selection is a row of x with the number of an expert, and its result is a row of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/moe/expert_table.h"
#include "backends/metal/moe/expert_tiling.h"
#include "backends/metal/moe/foreign_launches.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/decoder.h"
#include "plan/moe/experts.h"

namespace marlin::metal {

/// A matrix of every expert: one stack of all, or one matrix for each.
struct ForeignMatrices {
  std::span<const QuantizedWeights* const> weights;
  std::span<const float> biases = {};  ///< [experts, n]; empty: none.
};

struct ForeignLayer {
  ForeignMatrices gate;
  ForeignMatrices up = {};  ///< Without weights: `gate` holds both.
  ForeignMatrices down;
  GateOptions gate_options = {};
  bool batch_invariant = false;
};

class ForeignExperts {
 public:
  /// Prepares all matrices in host memory. Errors: kInvalidArgument, kUnsupported, kOutOfMemory.
  static Result<std::shared_ptr<ForeignExperts>> Make(const ForeignLayer& layer);
  ~ForeignExperts();

  int64_t experts() const { return static_cast<int64_t>(operands_.size()); }
  int64_t hidden() const { return layer_.hidden; }
  int64_t image_bytes() const;
  /// Writes the image, which kernels see at `address`, a multiple of 256, and drops this object's
  /// own weights: once.
  void WriteImage(std::byte* image, uint64_t address);

  ForeignExpertLaunches Launches(const ForeignExpertsCall& call, const DeviceShape& device,
                                 const PassLimits& limits = {}) const;

 private:
  class ImageMemory;  ///< The image's blocks in host memory.

  ForeignExperts();
  Status AddMatrices(const char* name, const ForeignMatrices& matrices,
                     ExpertOperand ExpertOperands::*part);
  Status CheckShapes() const;
  ExpertsProblem ProblemOf(const ForeignExpertsCall& call) const;
  void SetPlaces(KernelLaunch* launch) const;

  GateOptions gate_;
  bool batch_invariant_ = false;
  std::unique_ptr<ImageMemory> memory_;
  std::vector<std::shared_ptr<const PreparedStrips>> strips_;
  std::vector<ExpertOperands> operands_;
  LayerExperts layer_;
  std::shared_ptr<const ExpertTable> table_;
};

}  // namespace marlin::metal
