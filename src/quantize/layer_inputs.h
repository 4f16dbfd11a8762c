// The importance of errors of a linear layer's weights, learned from the layer's inputs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/cholesky.h"
#include "base/thread_pool.h"
#include "marlin/status.h"

namespace marlin {

/// The error of a layer's output for errors d = w - q of a column's weights is d H d^T, with the
/// Gram matrix H of the layer's inputs. Immutable; matrices with the same inputs share it.
struct InputCurvature {
  int64_t k = 0;
  /// f32 [k, k]: the damped H.
  std::vector<float> hessian;
  /// The order in which weights are quantized: by decreasing diagonal of H, ties by number.
  std::vector<int32_t> order;
  /// f32 [k, k], rows and columns in that order: H = R R^T with R upper triangular; row i holds
  /// R[j, i] / R[i, i] for j < i: how the errors of earlier weights move the target of weight i.
  std::vector<float> feedback;
};

/// The diagonal of H [k]: the importance of each weight of a column.
std::vector<float> DiagonalOf(const InputCurvature& curvature);

/// `gram` [k, k]: mean of x^T x over tokens. The diagonal is raised by 1 % of its mean, by more
/// where the factorization fails. Errors: kUnsupported for a matrix that is zero, or that cannot be
/// factorized although raised by 10 %, and as `cholesky`. Runs on `pool`; the result does not
/// depend on its threads.
Result<InputCurvature> MakeCurvature(ThreadPool& pool, const Cholesky& cholesky,
                                     std::span<const double> gram, int64_t k);

/// Moves weights so that, multiplied with the inputs that the layer gets in the quantized model,
/// they give the outputs that the originals give for the original inputs.
struct InputCorrection {
  int64_t k = 0;
  /// f32 [k, k]: row j is what is added to weight j per unit of the other weights.
  std::vector<float> shift;
};

/// `gram`: as above; `cross` [k, k]: mean of y^T x, with y the inputs of the original model for the
/// same tokens. Half of the correction is applied: all of it overfits few tokens. Errors: as above.
Result<InputCorrection> MakeCorrection(ThreadPool& pool, const Cholesky& cholesky,
                                       std::span<const double> gram, std::span<const double> cross,
                                       int64_t k);

}  // namespace marlin
