// Quantization for the inputs of a layer: errors of codes are compensated by later codes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "marlin/quantize.h"
#include "quantize/layer_inputs.h"
#include "quantize/panel_products.h"

namespace marlin {

/// A matrix [k, n] to quantize.
struct GptqMatrix {
  TensorView dense;
  QuantizeOptions options;
};

/// Weights that take about a gigabyte while they are quantized.
inline constexpr int64_t kGptqPanelWeights = int64_t{1} << 26;

struct GptqResult {
  QuantizedWeights weights;
  int64_t zeroed_groups = 0;  ///< As QuantizeReport's.
  double error = 0;           ///< Asked for: the sum of d H d^T over the columns.
};

struct GptqSettings {
  /// The most weights to quantize at a time; they are held in fp32.
  int64_t panel_weights = kGptqPanelWeights;
  bool measures_error = false;  ///< GptqResult::error, for one more pass over the weights.
};

/// Quantizes matrices with method kGptq, all for the same inputs: minimizes d H d^T of every
/// column's errors d.
///
///   1. `correction`, unless null, moves the weights.
///   2. Scales and zeros: SearchWeighted, with the diagonal of H as importance; fixed from here, so
///      that groups stay consecutive k although codes are chosen in another order.
///   3. In the order of `curvature`, every weight takes the code nearest to its target: the weight
///      plus the errors of earlier weights times `feedback`.
///   4. Three rounds of descent, of which the first two adjust each group's scale (and fractional
///      zero) to its codes; then every code in turn is set to the best one given all others.
///
/// With 2:4 sparsity, the two weights of every block of four that matter most by H's diagonal are
/// kept at first; codes of the others are 0 in steps 3 and 4, and the descent goes over blocks: it
/// sets a block to the best codes of the best of the six patterns, given all other blocks.
///
/// With Hadamard blocks a matrix is rotated first; curvature and correction are then made of
/// the rotated inputs (RotateGram).
///
/// Weights go through steps 3 and 4 in blocks of 256, the columns of all matrices side by side:
/// `products` gives the sums over all errors for the weights of a block, `pool` brings them up to
/// date from weight to weight. The result does not depend on the threads of `pool`. Errors: those
/// of Quantize, for the first matrix that has one, and of `products`. Precondition: curvature and
/// correction have the matrices' k; their options have the same group size, sparsity and Hadamard
/// blocks; the formats are quantized.
Result<std::vector<GptqResult>> QuantizeGptq(ThreadPool& pool, PanelProducts& products,
                                             std::span<const GptqMatrix> matrices,
                                             const InputCurvature& curvature,
                                             const InputCorrection* correction,
                                             const GptqSettings& settings = {});

}  // namespace marlin
