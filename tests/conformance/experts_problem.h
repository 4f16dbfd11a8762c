// The data of a case of experts: weights, tokens, selections and the expected result.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "experts_case.h"
#include "guarded_buffer.h"
#include "marlin/weights.h"
#include "reference/experts.h"

namespace marlin::conformance {

/// A matrix of an expert.
struct MatrixData {
  /// Shared by the experts of a stack; null: there is no matrix.
  std::shared_ptr<const QuantizedWeights> weights;
  int64_t index = 0;
  reference::DenseWeights dense;
  std::vector<float> bias;  ///< [n], or empty.

  reference::LinearMap map() const { return {weights ? &dense : nullptr, bias}; }
};

/// An expert; without matrices, it is on another device.
struct ExpertData {
  MatrixData gate;
  MatrixData up;
  MatrixData down;

  bool present() const { return down.weights != nullptr; }
  reference::Mlp mlp() const { return {gate.map(), up.map(), down.map()}; }
};

/// The tokens of an expert, and what it makes of them.
struct ExpertRows {
  const ExpertData* expert = nullptr;
  std::vector<int64_t> tokens;
  std::vector<double> weights;      ///< The factor of every row's result.
  std::vector<double> x;            ///< [rows, hidden]
  reference::Product shared_score;  ///< A gated shared expert's, [rows, 1], before the sigmoid.
  reference::MlpRun run;
};

struct ExpertsData {
  ExpertsCase c;
  std::vector<ExpertData> experts;
  ExpertData shared;
  MatrixData shared_gate;
  std::vector<double> x;         ///< [tokens, hidden], values of x_type.
  std::vector<int32_t> ids;      ///< [tokens, top_k]
  std::vector<float> weights;    ///< [tokens, top_k]
  std::vector<ExpertRows> rows;  ///< Only experts with tokens; the shared one comes last.
  std::vector<double> expected;  ///< [tokens, hidden], before rounding to the output type.
  std::vector<bool> exact;       ///< [tokens, hidden]; lattice data only, empty for others.
};

/// Builds data and reference. Errors: those of the reference.
Result<std::unique_ptr<ExpertsData>> MakeExpertsData(const ExpertsCase& c);

}  // namespace marlin::conformance
