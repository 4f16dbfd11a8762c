// AWQ: scales of a layer's inputs with which its quantized weights give smaller errors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "marlin/quantize.h"

namespace marlin {

/// The inputs of a layer, measured over tokens.
struct AwqInputs {
  int64_t k = 0;
  std::vector<float> mean_squares;  ///< [k]
  std::vector<float> sample;        ///< [tokens, k]: some of the tokens.
};

/// A matrix [k, n] that multiplies the inputs, and how it is quantized.
struct AwqMatrix {
  TensorView matrix;
  QuantizeOptions options;
};

/// Which inputs share a scale: input i has number scale_of[i]. Empty: every input has its own.
struct AwqSharing {
  std::vector<int32_t> scale_of;  ///< [k]
  int64_t scales = 0;

  int64_t count(int64_t k) const { return scale_of.empty() ? k : scales; }
  int64_t of(int64_t input) const {
    return scale_of.empty() ? input : scale_of[static_cast<size_t>(input)];
  }
};

/// The exponents e of scales 2^e: weights of an input are multiplied with its scale before they are
/// quantized, and the input is divided by it. Powers of two change no bit of the other values, so
/// the model with scales computes what it did without.
///
/// Candidates are rms^a / w^b, with rms of an input, w the mean magnitude of its weights relative
/// to the largest weight of their column, a in steps of 0.1 and b either 0 or 1 - a. The error of a
/// candidate is the error of the sample's outputs, relative to the outputs and summed over the
/// matrices, of which `columns` columns are quantized with kRtn in all. Empty: no candidate lowers
/// the error by at least 2 %.
///
/// Runs on `pool`; the result does not depend on its threads. Errors: kOutOfMemory, and those of
/// Quantize. Precondition: all matrices have inputs.k rows; the sample is not empty.
Result<std::vector<int8_t>> SearchAwqExponents(ThreadPool& pool, const AwqInputs& inputs,
                                               const AwqSharing& sharing,
                                               std::span<const AwqMatrix> matrices,
                                               int64_t columns);

}  // namespace marlin
