// The step that fits the scale and zero point of every group of a tile to its codes.
#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "layout/packing.h"
#include "quantize/gptq_steps.h"

namespace marlin {
namespace {

/// How a group's part of the loss changes while its scale moves along u = value - zero, and its
/// zero point along -1.
struct Slopes {
  double scale[kGptqColumns] = {};
  double scale_curve[kGptqColumns] = {};
  double zero[kGptqColumns] = {};
  double zero_curve = 0;
  double mixed[kGptqColumns] = {};
};

/// By how much a scale moved, and its zero point in units of weights.
struct Moved {
  double scale = 0;
  double zero = 0;
};

/// u, gradients [weights of the group][kGptqColumns]; the latter are H times the errors.
Slopes SlopesOf(const GptqBlock& block, int64_t first, const std::vector<float>& u,
                const std::vector<float>& gradients) {
  Slopes slopes;
  const int64_t count = static_cast<int64_t>(u.size()) / kGptqColumns;
  for (int64_t i = 0; i < count; ++i) {
    const float* const row = block.Factors(first + i) + first;
    GptqLanes hu = {};
    AddCombination(row, u.data(), count, hu);
    slopes.zero_curve += static_cast<double>(std::accumulate(row, row + count, 0.0F));
    for (int64_t c = 0; c < kGptqColumns; ++c) {
      const auto at = static_cast<size_t>(i * kGptqColumns + c);
      const double own = u[at];
      const double gradient = gradients[at];
      slopes.scale[c] += gradient * own;
      slopes.scale_curve[c] += own * static_cast<double>(hu[c]);
      slopes.zero[c] -= gradient;
      slopes.mixed[c] -= static_cast<double>(hu[c]);
    }
  }
  return slopes;
}

/// Moves a group's scale in one column, then its zero point, to the minimum of the loss as far as
/// their types allow, if that lowers it.
Moved MoveParameters(const GptqProblem& problem, const ScaleCoder& coder, const Slopes& slopes,
                     int64_t column, GroupParameters* parameters) {
  Moved moved;
  const auto scale = static_cast<double>(parameters->scale.value);
  if (scale == 0.0) return moved;
  const double slope = slopes.scale[column];
  const double curve = slopes.scale_curve[column];
  if (curve > 0.0) {
    const StoredScale rounded = coder.Round(static_cast<float>(scale + slope / curve));
    const double step = static_cast<double>(rounded.value) - scale;
    const bool same_sign = scale < 0.0 ? rounded.value < 0.0F : rounded.value > 0.0F;
    if (!rounded.overflow && same_sign && step * (step * curve - 2 * slope) < 0.0) {
      parameters->scale = rounded;
      moved.scale = step;
    }
  }
  if (!problem.spec.has_zeros || !problem.options.fractional_zeros || slopes.zero_curve <= 0.0) {
    return moved;
  }
  // With the new scale, a step z of the zero changes every weight by -scale * z.
  const double new_scale = parameters->scale.value;
  const auto zero = static_cast<double>(parameters->zero);
  const double rest = slopes.zero[column] - moved.scale * slopes.mixed[column];
  const float rounded =
      problem.rule.RoundZero(static_cast<float>(zero + rest / slopes.zero_curve / new_scale));
  const double step = new_scale * (static_cast<double>(rounded) - zero);
  if (step * (step * slopes.zero_curve - 2 * rest) < 0.0) {
    parameters->zero = rounded;
    moved.zero = step;
  }
  return moved;
}

}  // namespace

void GptqTile::AdjustGroup(const ScaleCoder& coder, const GptqBlock& block, int64_t first,
                           Steps& steps) {
  const int64_t k0 = block.weights[static_cast<size_t>(first)];
  const int64_t count = std::min(spec_.group_size, block.count() - first);
  const int64_t padded = RoundUp(k_, kPackRun);
  const std::span<const float> values = problem_.encoder.values();
  std::vector<float> gradients(static_cast<size_t>(count * kGptqColumns));
  std::vector<float> u(gradients.size());
  for (int64_t i = 0; i < count; ++i) {
    GptqLanes sums;
    steps.Take(first + i, first, sums);
    std::copy_n(sums, kGptqColumns, Row(gradients, i));
    for (int64_t c = 0; c < columns_; ++c) {
      const uint8_t code = codes_[static_cast<size_t>(c * padded + k0 + i)];
      Row(u, i)[c] = values[code] - Parameters(k0, c).zero;
    }
  }
  const Slopes slopes = SlopesOf(block, first, u, gradients);
  Moved moved[kGptqColumns];
  for (int64_t c = 0; c < columns_; ++c) {
    moved[c] = MoveParameters(problem_, coder, slopes, c, &Parameters(k0, c));
  }
  for (int64_t i = 0; i < count; ++i) {
    float* const errors = Row(errors_, k0 + i);
    GptqLanes before;
    std::copy_n(errors, kGptqColumns, before);
    for (int64_t c = 0; c < kGptqColumns; ++c) {
      errors[c] -=
          static_cast<float>(moved[c].scale * static_cast<double>(Row(u, i)[c]) - moved[c].zero);
    }
    steps.Change(first + i, before, errors);
  }
}

void GptqTile::AdjustGroups(const ScaleCoder& coder, const GptqBlock& block) {
  Steps steps(block, columns_);
  for (int64_t i = 0; i < block.count(); i += spec_.group_size) AdjustGroup(coder, block, i, steps);
  StoreErrors(block);
}

}  // namespace marlin
