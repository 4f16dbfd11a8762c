// The matrices of a layer's experts as the kernels read them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/kernels/moe/expert_parameters.h"
#include "backends/metal/runtime/driver.h"
#include "plan/moe/experts.h"

namespace marlin::metal {

/// Matrices that one launch computes: of one kind (kernels::WeightKind), of any expert.
struct MatrixGroup {
  /// Those that weights and biases decide, and whether the activation is part of the epilogue.
  FunctionConstants constants{};
  kernels::ExpertPart part = kernels::kPartGate;
  int parts = 1;          ///< 2: of `part` and of the part after it.
  int64_t columns = 0;    ///< The largest n.
  int64_t chunks = 0;     ///< Chunks of the largest k.
  bool routed = false;    ///< Whether there are matrices of experts besides the shared one.
  bool shared = false;    ///< Whether there are matrices of the shared expert.
  StripPart table = {};   ///< The value table of the first.
  bool one_table = true;  ///< Whether all have it.
  bool gated() const { return constants[MARLIN_CONSTANT_GATED] != 0; }
};

/// A table of ExpertMatrix, [experts + 1][kExpertParts], and the biases. Immutable.
class ExpertTable {
 public:
  /// Refers to the weights, which outlive it, and copies the biases. Errors: kOutOfMemory.
  static Result<std::shared_ptr<const ExpertTable>> Make(const LayerExperts& layer, Driver& driver);

  MemoryRange matrices() const { return {memory_.get(), matrix_bytes_}; }
  /// The weights and biases that the table has addresses of.
  const std::shared_ptr<const ReachedMemory>& reached() const { return reached_; }
  /// The groups of gate and up, in any order; groups of the same step read the same rows.
  std::span<const MatrixGroup> first_groups() const { return first_; }
  std::span<const MatrixGroup> down_groups() const { return down_; }
  /// The gate of the shared expert: one group, or none.
  std::span<const MatrixGroup> score_groups() const { return score_; }
  /// Columns of the rows between the two steps: the columns of gate | up where not every gate is
  /// multiplied with its up at once. A multiple of 4, so that rows are aligned.
  int64_t inner_stride() const { return inner_stride_; }
  /// The largest inner of the experts whose activation is a launch of its own; 0: there are none.
  int64_t ungated_inner() const { return ungated_inner_; }
  int64_t present_experts() const { return present_; }

 private:
  friend class ExpertTableBuilder;

  DriverMemory<std::byte> memory_;
  int64_t matrix_bytes_ = 0;
  std::shared_ptr<const ReachedMemory> reached_;
  std::vector<MatrixGroup> first_;
  std::vector<MatrixGroup> down_;
  std::vector<MatrixGroup> score_;
  int64_t inner_stride_ = 0;
  int64_t ungated_inner_ = 0;
  int64_t present_ = 0;
};

}  // namespace marlin::metal
