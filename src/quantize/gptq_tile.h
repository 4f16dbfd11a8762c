// Some columns of a matrix that gptq quantizes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/quantize.h"
#include "quantize/column_tile.h"
#include "quantize/encoder.h"
#include "quantize/quantizer.h"
#include "quantize/scales.h"
#include "quantize/sparse_block.h"

namespace marlin {

/// A matrix and what its tiles share.
struct GptqProblem {
  const QuantizeOptions& options;
  const WeightsSpec& spec;
  const Encoder& encoder;
  const ScaleRule& rule;
  std::span<const float> importance;  ///< The diagonal of H [k].
  WeightsBuffer* buffer;
  int64_t groups;
};

/// A block of consecutive weights, in a pass's order, that one step visits in every column.
struct GptqBlock {
  std::span<const int32_t> weights;  ///< Their k.
  /// f32 [weights, weights]: the pass's matrix between the weights of the block.
  const float* factors;
  /// f32 [columns, weights]: that matrix times the errors of all weights, as they were before the
  /// block.
  const float* products;
  float* errors;  ///< f32 [columns, weights]: becomes the errors after the block.

  int64_t count() const { return static_cast<int64_t>(weights.size()); }
  const float* Factors(int64_t i) const { return factors + i * count(); }
};

/// Columns [n0, n0 + columns) of a matrix, with up to kGptqColumns columns. Arrays
/// [k][kGptqColumns] hold k rows of lanes; lanes beyond the columns are zero.
class GptqTile {
 public:
  GptqTile(const GptqProblem& problem, int64_t n0);

  int64_t columns() const { return columns_; }

  /// Loads the weights. Errors: kNonFiniteInput.
  Status Load(const MatrixView& matrix);
  /// The largest span of a group.
  double Span() const;
  /// Writes the weights, or their errors, in an order of k: f32 [columns, k].
  void GatherWeights(std::span<const int32_t> order, float* out) const {
    Gather(weights_, order, out);
  }
  void GatherErrors(std::span<const int32_t> order, float* out) const {
    Gather(errors_, order, out);
  }
  /// Chooses scales and zeros, and with 2:4 sparsity the weights that are kept at first; counts
  /// groups whose scale rounds to zero. Errors: a scale that overflows.
  Status Begin(const ScaleCoder& coder, int64_t* zeroed_groups);
  /// Stores codes, scales and zeros.
  void Store();

  // Steps of passes; each visits the weights of a block in order.
  /// Adds the products to the weights.
  void Move(const GptqBlock& block);
  /// Gives every weight the code nearest to the weight plus the products of earlier weights'
  /// errors.
  void Sweep(const GptqBlock& block);
  /// Sets every code to the best one given all others.
  void Descend(const GptqBlock& block);
  /// Sets the codes of every block of four weights to the best 2:4 pattern; the one or two weights
  /// of a short last block are set as in Descend.
  void DescendPatterns(const GptqBlock& block);
  /// Changes nothing; returns the part of d H d^T of the block's weights, where the products are of
  /// H with the errors.
  double ErrorOf(const GptqBlock& block) const;
  /// Moves the scale of every group, and its zero point, to the best one given the codes.
  void AdjustGroups(const ScaleCoder& coder, const GptqBlock& block);

 private:
  class Steps;

  float* Row(std::vector<float>& rows, int64_t k) const { return rows.data() + k * kGptqColumns; }
  const float* Row(const std::vector<float>& rows, int64_t k) const {
    return rows.data() + k * kGptqColumns;
  }
  GroupParameters& Parameters(int64_t k, int64_t column) {
    return parameters_[static_cast<size_t>((k / spec_.group_size) * kGptqColumns + column)];
  }
  void Gather(const std::vector<float>& rows, std::span<const int32_t> order, float* out) const;
  void EncodeRow(int64_t k, const GptqLanes& targets);
  void DescendRow(const GptqBlock& block, int64_t i, Steps& steps);
  void DescendPattern(const GptqBlock& block, int64_t position, int64_t count, Steps& steps);
  void AdjustGroup(const ScaleCoder& coder, const GptqBlock& block, int64_t first, Steps& steps);
  void StoreErrors(const GptqBlock& block) const;

  const GptqProblem& problem_;
  const WeightsSpec& spec_;
  int64_t k_;
  int64_t n0_;
  int64_t columns_;
  std::vector<float> weights_;  ///< [k][kGptqColumns]
  std::vector<float> errors_;   ///< [k][kGptqColumns]: weight minus its decoded code.
  std::vector<uint8_t> codes_;  ///< [kGptqColumns][padded k]
  std::vector<uint8_t> kept_;   ///< [k][kGptqColumns]: 0 where 2:4 prunes; empty for dense weights.
  std::vector<GroupParameters> parameters_;  ///< [groups][kGptqColumns]
};

}  // namespace marlin
