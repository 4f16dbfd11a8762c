// A block of a matrix with 2:4 sparsity whose codes compensate each other's errors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/sparse_24.h"
#include "quantize/encoder.h"
#include "quantize/scales.h"

namespace marlin {

inline constexpr int64_t kGptqColumns = 32;  ///< Columns of a task: eight SSE registers of sums.
/// One value for each of a task's columns.
using GptqLanes = float[kGptqColumns];

/// 1 for the two weights of every block of largest importance times square, which are kept at
/// first, otherwise 0; ties go to the lower k. weights [k][kGptqColumns], importance [k].
std::vector<uint8_t> ChooseKept(std::span<const float> weights, std::span<const float> importance);

/// Codes and errors of one block of up to four weights of every column, and what they cost.
struct SparseBlock {
  using Row = float[kSparseBlock];

  SparseBlock(int64_t weight_count, const Row* curvature, const GptqLanes* outside)
      : count(weight_count), h(curvature), pull(outside) {}

  /// Gives weight i of every column the code nearest to its best value: the joint minimum of both
  /// if `with` is free too, else the minimum given all other errors of the block.
  void Encode(const Encoder& encoder, const GroupParameters* parameters, int64_t i, int64_t with,
              const float* weights) {
    GptqLanes scaled;
    for (int64_t c = 0; c < kGptqColumns; ++c) {
      const float scale = parameters[c].scale.value;
      const float error = with < 0 ? -Slope(i, c, i, i) / h[i][i] : JointError(i, with, c);
      scaled[c] = scale == 0.0F ? 0.0F : (weights[c] - error) / scale;
    }
    encoder.Encode(scaled, kGptqColumns, 1.0F, 0.0F, codes[i]);
    for (int64_t c = 0; c < kGptqColumns; ++c) {
      const float scale = parameters[c].scale.value;
      if (scale == 0.0F) codes[i][c] = encoder.zero_code();
      errors[i][c] = weights[c] - (scale == 0.0F ? 0.0F : scale * encoder.values()[codes[i][c]]);
    }
  }

  void Measure() {
    for (int64_t c = 0; c < kGptqColumns; ++c) {
      cost[c] = 0;
      for (int64_t i = 0; i < count; ++i) {
        cost[c] += errors[i][c] * (pull[i][c] + Slope(i, c, -1, -1));
      }
    }
  }

  void TakeBetter(const SparseBlock& other) {
    for (int64_t c = 0; c < kGptqColumns; ++c) {
      if (!(other.cost[c] < cost[c])) continue;
      cost[c] = other.cost[c];
      for (int64_t i = 0; i < count; ++i) {
        codes[i][c] = other.codes[i][c];
        errors[i][c] = other.errors[i][c];
      }
    }
  }

  /// Takes the best pattern of two weights, in the columns where it is better. `weights`: [count]
  /// [kGptqColumns].
  void TakeBestPattern(const Encoder& encoder, const GroupParameters* parameters,
                       const float* weights) {
    for (int64_t p = 0; p + 1 < count; ++p) {
      for (int64_t q = p + 1; q < count; ++q) {
        SparseBlock pattern(count, h, pull);
        for (int64_t i = 0; i < count; ++i) {
          std::copy_n(weights + i * kGptqColumns, kGptqColumns, pattern.errors[i]);
          std::fill_n(pattern.codes[i], kGptqColumns, encoder.zero_code());
        }
        // The first code is rounded from the joint minimum; the second one compensates that
        // rounding.
        pattern.Encode(encoder, parameters, p, q, weights + p * kGptqColumns);
        pattern.Encode(encoder, parameters, q, -1, weights + q * kGptqColumns);
        pattern.Measure();
        TakeBetter(pattern);
      }
    }
  }

  int64_t count;
  const Row* h;
  const GptqLanes* pull;
  GptqLanes errors[kSparseBlock] = {};
  uint8_t codes[kSparseBlock][kGptqColumns] = {};
  GptqLanes cost = {};

 private:
  /// Half the derivative by the error of weight i, without the terms of errors `a` and `b`.
  float Slope(int64_t i, int64_t c, int64_t a, int64_t b) const {
    float slope = pull[i][c];
    for (int64_t j = 0; j < count; ++j) {
      if (j != a && j != b) slope += h[i][j] * errors[j][c];
    }
    return slope;
  }
  /// The error of weight i at the joint minimum over the errors of i and j.
  float JointError(int64_t i, int64_t j, int64_t c) const {
    const float determinant = h[i][i] * h[j][j] - h[i][j] * h[j][i];
    if (!(determinant > 0.0F)) return -Slope(i, c, i, j) / h[i][i];
    return (h[i][j] * Slope(j, c, i, j) - h[j][j] * Slope(i, c, i, j)) / determinant;
  }
};

}  // namespace marlin
