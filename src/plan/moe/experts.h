// The experts of a layer as a backend sees them: matrices, the problem, a planned run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "marlin/moe.h"
#include "plan/gemm/backend.h"
#include "plan/gemm/gemm_desc.h"
#include "plan/gemm/select.h"

namespace marlin {

/// A checked ExpertMatrix.
struct ExpertOperand {
  const PreparedWeights::Storage* weights = nullptr;  ///< Null: there is none.
  int64_t index = 0;
  const float* bias = nullptr;
};

/// A checked Expert.
struct ExpertOperands {
  ExpertOperand gate;
  ExpertOperand up;  ///< Null weights: `gate` holds both.
  ExpertOperand down;

  bool present() const { return down.weights != nullptr; }
  int64_t inner() const { return present() ? down.weights->spec.k : 0; }
};

/// A checked ExpertSet; the plans of a backend refer to it.
struct LayerExperts {
  std::span<const ExpertOperands> experts;
  ExpertOperands shared;
  const PreparedWeights::Storage* shared_gate = nullptr;
  int64_t hidden = 0;
};

/// The GEMM of one matrix with `rows` rows.
GemmDesc DescribeExpert(const ExpertsProblem& problem, const ExpertOperand& matrix, int64_t rows,
                        DType a_type);

/// The checked operands of a run. Strides count elements; columns are contiguous.
struct ExpertsCall {
  const void* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* ids = nullptr;    ///< [tokens, top_k], unchecked values.
  const float* weights = nullptr;  ///< [tokens, top_k]
  void* out = nullptr;
  int64_t out_stride = 0;
  std::byte* workspace = nullptr;
  void* stream = nullptr;
};

/// A backend's plan of the experts of a layer. Immutable and usable from any thread; backend and
/// experts outlive it.
class PlannedExperts {
 public:
  virtual ~PlannedExperts() = default;
  virtual int64_t workspace_bytes() const = 0;
  /// Precondition: tokens and top_k are not 0. Returns once the work is enqueued.
  virtual Status Run(const ExpertsCall& call) const = 0;
};

}  // namespace marlin
