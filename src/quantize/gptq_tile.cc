#include "quantize/gptq_tile.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/packing.h"
#include "layout/sparse_24.h"
#include "marlin/layout.h"
#include "quantize/group_search.h"

namespace marlin {
namespace {

constexpr int64_t kColumns = kGptqColumns;

// Where the loader can choose, wider vectors do the same operations in the same order.
#if defined(__x86_64__) && defined(__GLIBC__)
#define MARLIN_ANY_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MARLIN_ANY_VECTORS
#endif

/// sums[c] += sum over j < count of factors[j] * rows[j][c].
MARLIN_ANY_VECTORS void Combine(const float* factors, const float* rows, int64_t count,
                                GptqLanes& sums) {
  float local[kColumns] = {};
  for (int64_t j = 0; j < count; ++j) {
    const float factor = factors[j];
    const float* const row = rows + j * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) local[c] += factor * row[c];
  }
  for (int64_t c = 0; c < kColumns; ++c) sums[c] += local[c];
}

}  // namespace

/// The products of a block's weights, kept up to date while the errors of these weights change.
class GptqTile::Steps {
 public:
  Steps(const GptqBlock& block, int64_t columns)
      : block_(block),
        products_(static_cast<size_t>(block.count() * kColumns)),
        changes_(products_.size()) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t i = 0; i < block.count(); ++i) {
        products_[static_cast<size_t>(i * kColumns + c)] = block.products[c * block.count() + i];
      }
    }
  }

  /// The products of weight i, where the errors of the first `changed` weights have changed.
  void Take(int64_t i, int64_t changed, Lanes& sums) const {
    std::copy_n(products_.data() + i * kColumns, kColumns, sums);
    Combine(block_.Factors(i), changes_.data(), changed, sums);
  }

  /// Notes how the errors of weight i change.
  void Change(int64_t i, const float* before, const float* after) {
    float* const change = changes_.data() + i * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) change[c] = after[c] - before[c];
  }

 private:
  const GptqBlock& block_;
  std::vector<float> products_;  ///< [weights of the block][kColumns]
  std::vector<float> changes_;   ///< The same.
};

GptqTile::GptqTile(const GptqProblem& problem, int64_t n0)
    : problem_(problem),
      spec_(problem.spec),
      k_(spec_.k),
      n0_(n0),
      columns_(std::min(kColumns, spec_.n - n0)) {}

Status GptqTile::Load(const MatrixView& matrix) {
  weights_.assign(static_cast<size_t>(k_ * kColumns), 0.0F);
  std::vector<float> column(static_cast<size_t>(k_));
  for (int64_t c = 0; c < columns_; ++c) {
    LoadColumns(matrix, {0, k_, n0_ + c, 1}, column.data(), k_);
    for (int64_t k = 0; k < k_; ++k) {
      if (!std::isfinite(column[static_cast<size_t>(k)])) {
        return NonFiniteWeight(problem_.options.tensor_name, column[static_cast<size_t>(k)], spec_,
                               0, k, n0_ + c);
      }
      Row(weights_, k)[c] = column[static_cast<size_t>(k)];
    }
  }
  return {};
}

double GptqTile::Span() const {
  double span = 0;
  std::vector<float> run(static_cast<size_t>(k_));
  for (int64_t c = 0; c < columns_; ++c) {
    for (int64_t k = 0; k < k_; ++k) run[static_cast<size_t>(k)] = Row(weights_, k)[c];
    for (int64_t k = 0; k < k_; k += spec_.group_size) {
      const int64_t count = std::min(spec_.group_size, k_ - k);
      span = std::max(span, problem_.rule.Span(RangeOf(run.data() + k, count, spec_.has_zeros)));
    }
  }
  return span;
}

void GptqTile::Gather(const std::vector<float>& rows, std::span<const int32_t> order,
                      float* out) const {
  for (size_t i = 0; i < order.size(); ++i) {
    const float* const row = Row(rows, order[i]);
    for (int64_t c = 0; c < columns_; ++c) out[c * k_ + static_cast<int64_t>(i)] = row[c];
  }
}

void GptqTile::GatherWeights(std::span<const int32_t> order, float* out) const {
  Gather(weights_, order, out);
}

void GptqTile::GatherErrors(std::span<const int32_t> order, float* out) const {
  Gather(errors_, order, out);
}

Status GptqTile::Begin(const ScaleCoder& coder, int64_t* zeroed_groups) {
  const GroupContext context{problem_.encoder, problem_.rule, coder, spec_.has_zeros};
  if (problem_.options.sparsity == Sparsity::k24) ChooseKept();
  errors_.assign(weights_.size(), 0.0F);
  codes_.assign(static_cast<size_t>(kColumns * RoundUp(k_, kPackRun)), 0);
  parameters_.assign(static_cast<size_t>(problem_.groups * kColumns), {});
  std::vector<float> run(static_cast<size_t>(k_));
  std::vector<float> importance(problem_.importance.begin(), problem_.importance.end());
  for (int64_t c = 0; c < columns_; ++c) {
    for (int64_t k = 0; k < k_; ++k) run[static_cast<size_t>(k)] = Row(weights_, k)[c];
    // A pruned weight is 0 whatever the scale.
    for (size_t k = 0; k < importance.size() && !kept_.empty(); ++k) {
      const bool kept = kept_[k * kColumns + static_cast<size_t>(c)] != 0;
      importance[k] = kept ? problem_.importance[k] : 0.0F;
    }
    for (int64_t k = 0; k < k_; k += spec_.group_size) {
      const int64_t count = std::min(spec_.group_size, k_ - k);
      const GroupRange range = RangeOf(run.data() + k, count, spec_.has_zeros);
      const GroupParameters chosen =
          SearchWeighted(context, range, run.data() + k, importance.data() + k, count);
      if (chosen.scale.overflow) {
        return ScaleOverflow(problem_.options.tensor_name, spec_,
                             problem_.rule.Span(range) / problem_.rule.levels(), 0, k, n0_ + c);
      }
      if (chosen.scale.value == 0.0F && range.amax > 0.0F) ++*zeroed_groups;
      Parameters(k, c) = chosen;
    }
  }
  return {};
}

/// Sets the codes of row k to those nearest to the targets, and the row's errors.
void GptqTile::EncodeRow(int64_t k, const Lanes& targets) {
  Lanes scaled;
  const GroupParameters* const row = &Parameters(k, 0);
  for (int64_t c = 0; c < kColumns; ++c) {
    const float scale = row[c].scale.value;
    scaled[c] = scale == 0.0F ? 0.0F : targets[c] / scale + row[c].zero;
  }
  uint8_t codes[kColumns];
  problem_.encoder.Encode(scaled, kColumns, 1.0F, 0.0F, codes);
  const int64_t padded = RoundUp(k_, kPackRun);
  const std::span<const float> values = problem_.encoder.values();
  for (int64_t c = 0; c < columns_; ++c) {
    const float scale = row[c].scale.value;
    const bool pruned = !kept_.empty() && kept_[static_cast<size_t>(k * kColumns + c)] == 0;
    const uint8_t code = scale == 0.0F || pruned ? problem_.encoder.zero_code() : codes[c];
    codes_[static_cast<size_t>(c * padded + k)] = code;
    const float decoded = scale == 0.0F ? 0.0F : scale * (values[code] - row[c].zero);
    Row(errors_, k)[c] = Row(weights_, k)[c] - decoded;
  }
}

void GptqTile::Move(const GptqBlock& block) {
  for (int64_t i = 0; i < block.count(); ++i) {
    float* const row = Row(weights_, block.weights[static_cast<size_t>(i)]);
    for (int64_t c = 0; c < columns_; ++c) row[c] += block.products[c * block.count() + i];
  }
}

void GptqTile::Sweep(const GptqBlock& block) {
  Steps steps(block, columns_);
  for (int64_t i = 0; i < block.count(); ++i) {
    const int64_t k = block.weights[static_cast<size_t>(i)];
    Lanes targets;
    steps.Take(i, i, targets);
    for (int64_t c = 0; c < kColumns; ++c) targets[c] += Row(weights_, k)[c];
    const Lanes none = {};
    EncodeRow(k, targets);
    steps.Change(i, none, Row(errors_, k));
  }
  StoreErrors(block);
}

void GptqTile::DescendRow(const GptqBlock& block, int64_t i, Steps& steps) {
  const int64_t k = block.weights[static_cast<size_t>(i)];
  Lanes targets;
  steps.Take(i, i, targets);
  const float own = block.Factors(i)[i];
  const float* const weights = Row(weights_, k);
  Lanes before;
  std::copy_n(Row(errors_, k), kColumns, before);
  for (int64_t c = 0; c < kColumns; ++c) {
    targets[c] = weights[c] - before[c] + targets[c] / own;
  }
  EncodeRow(k, targets);
  steps.Change(i, before, Row(errors_, k));
}

void GptqTile::Descend(const GptqBlock& block) {
  Steps steps(block, columns_);
  for (int64_t i = 0; i < block.count(); ++i) DescendRow(block, i, steps);
  StoreErrors(block);
}

/// Keeps the two weights of every block of largest importance times square; ties go to the lower
/// k. The descent revises the choice.
void GptqTile::ChooseKept() {
  kept_.assign(weights_.size(), 0);
  for (int64_t k = 0; k < k_; ++k) {
    const int64_t first = k / kSparseBlock * kSparseBlock;
    const int64_t end = std::min(first + kSparseBlock, k_);
    for (int64_t c = 0; c < kColumns; ++c) {
      const auto rank = [&](int64_t i) {
        const float w = Row(weights_, i)[c];
        return problem_.importance[static_cast<size_t>(i)] * w * w;
      };
      int larger = 0;
      for (int64_t i = first; i < end; ++i) {
        larger += rank(i) > rank(k) || (rank(i) == rank(k) && i < k) ? 1 : 0;
      }
      kept_[static_cast<size_t>(k * kColumns + c)] = larger < 2 ? 1 : 0;
    }
  }
}

/// Sets the codes of a block of three or four weights to those of its best pattern.
void GptqTile::DescendPattern(const GptqBlock& block, int64_t position, int64_t count,
                              Steps& steps) {
  const int64_t first = block.weights[static_cast<size_t>(position)];
  float h[kSparseBlock][kSparseBlock];
  Lanes pull[kSparseBlock];  // The gradient of the errors outside the block.
  for (int64_t i = 0; i < count; ++i) {
    steps.Take(position + i, position, pull[i]);
    for (int64_t j = 0; j < count; ++j) {
      h[i][j] = block.Factors(position + i)[position + j];
      const float* const errors = Row(errors_, first + j);
      for (int64_t c = 0; c < kColumns; ++c) pull[i][c] -= h[i][j] * errors[c];
    }
  }
  const int64_t padded = RoundUp(k_, kPackRun);
  const GroupParameters* const parameters = &Parameters(first, 0);
  SparseBlock best(count, h, pull);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < columns_; ++c) {
      best.codes[i][c] = codes_[static_cast<size_t>(c * padded + first + i)];
    }
    std::copy_n(Row(errors_, first + i), kColumns, best.errors[i]);
  }
  best.Measure();
  for (int64_t p = 0; p + 1 < count; ++p) {
    for (int64_t q = p + 1; q < count; ++q) {
      SparseBlock pattern(count, h, pull);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(Row(weights_, first + i), kColumns, pattern.errors[i]);
        std::fill_n(pattern.codes[i], kColumns, problem_.encoder.zero_code());
      }
      // The better of two codes where both are free is that of the joint minimum; the other one
      // then compensates its rounding.
      pattern.Encode(problem_.encoder, parameters, p, q, Row(weights_, first + p));
      pattern.Encode(problem_.encoder, parameters, q, -1, Row(weights_, first + q));
      pattern.Measure();
      best.TakeBetter(pattern);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    steps.Change(position + i, Row(errors_, first + i), best.errors[i]);
    std::copy_n(best.errors[i], kColumns, Row(errors_, first + i));
    for (int64_t c = 0; c < columns_; ++c) {
      codes_[static_cast<size_t>(c * padded + first + i)] = best.codes[i][c];
    }
  }
}

void GptqTile::DescendPatterns(const GptqBlock& block) {
  Steps steps(block, columns_);
  for (int64_t i = 0; i < block.count();) {
    const int64_t k = block.weights[static_cast<size_t>(i)];
    const int64_t count = std::min(kSparseBlock, k_ - k / kSparseBlock * kSparseBlock);
    if (count <= 2) {
      DescendRow(block, i++, steps);  // Both weights are kept.
    } else {
      DescendPattern(block, i, count, steps);
      i += count;
    }
  }
  StoreErrors(block);
}

/// How a group's part of the loss changes while its scale moves along u = value - zero, and its
/// zero point along -1.
struct GptqTile::Slopes {
  double scale[kColumns] = {};
  double scale_curve[kColumns] = {};
  double zero[kColumns] = {};
  double zero_curve = 0;
  double mixed[kColumns] = {};
};

/// u, gradients [weights of the group][kColumns]; the latter are H times the errors.
GptqTile::Slopes GptqTile::SlopesOf(const GptqBlock& block, int64_t first,
                                    const std::vector<float>& u,
                                    const std::vector<float>& gradients) const {
  Slopes slopes;
  const int64_t count = static_cast<int64_t>(u.size()) / kColumns;
  for (int64_t i = 0; i < count; ++i) {
    const float* const row = block.Factors(first + i) + first;
    Lanes hu = {};
    Combine(row, u.data(), count, hu);
    slopes.zero_curve += static_cast<double>(std::accumulate(row, row + count, 0.0F));
    for (int64_t c = 0; c < kColumns; ++c) {
      const double own = Row(u, i)[c];
      const double gradient = Row(gradients, i)[c];
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
GptqTile::Moved GptqTile::MoveParameters(const ScaleCoder& coder, const Slopes& slopes,
                                         int64_t column, GroupParameters* parameters) const {
  Moved moved;
  const auto scale = static_cast<double>(parameters->scale.value);
  if (scale == 0.0) return moved;
  const double slope = slopes.scale[column];
  const double curve = slopes.scale_curve[column];
  if (curve > 0.0) {
    const StoredScale rounded =
        coder.Round(std::max(static_cast<float>(scale + slope / curve), 0.0F));
    const double step = static_cast<double>(rounded.value) - scale;
    if (!rounded.overflow && rounded.value > 0.0F && step * (step * curve - 2 * slope) < 0.0) {
      parameters->scale = rounded;
      moved.scale = step;
    }
  }
  if (!spec_.has_zeros || !problem_.options.fractional_zeros || slopes.zero_curve <= 0.0) {
    return moved;
  }
  // With the new scale, a step z of the zero changes every weight by -scale * z.
  const double new_scale = parameters->scale.value;
  const auto zero = static_cast<double>(parameters->zero);
  const double rest = slopes.zero[column] - moved.scale * slopes.mixed[column];
  const float rounded =
      problem_.rule.RoundZero(static_cast<float>(zero + rest / slopes.zero_curve / new_scale));
  const double step = new_scale * (static_cast<double>(rounded) - zero);
  if (step * (step * slopes.zero_curve - 2 * rest) < 0.0) {
    parameters->zero = rounded;
    moved.zero = step;
  }
  return moved;
}

void GptqTile::AdjustGroup(const ScaleCoder& coder, const GptqBlock& block, int64_t first,
                           Steps& steps) {
  const int64_t k0 = block.weights[static_cast<size_t>(first)];
  const int64_t count = std::min(spec_.group_size, block.count() - first);
  const int64_t padded = RoundUp(k_, kPackRun);
  const std::span<const float> values = problem_.encoder.values();
  std::vector<float> gradients(static_cast<size_t>(count * kColumns));
  std::vector<float> u(gradients.size());
  for (int64_t i = 0; i < count; ++i) {
    Lanes sums;
    steps.Take(first + i, first, sums);
    std::copy_n(sums, kColumns, Row(gradients, i));
    for (int64_t c = 0; c < columns_; ++c) {
      const uint8_t code = codes_[static_cast<size_t>(c * padded + k0 + i)];
      Row(u, i)[c] = values[code] - Parameters(k0, c).zero;
    }
  }
  const Slopes slopes = SlopesOf(block, first, u, gradients);
  Moved moved[kColumns];
  for (int64_t c = 0; c < columns_; ++c) {
    moved[c] = MoveParameters(coder, slopes, c, &Parameters(k0, c));
  }
  for (int64_t i = 0; i < count; ++i) {
    float* const errors = Row(errors_, k0 + i);
    Lanes before;
    std::copy_n(errors, kColumns, before);
    for (int64_t c = 0; c < kColumns; ++c) {
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

double GptqTile::ErrorOf(const GptqBlock& block) const {
  double sum = 0;
  for (int64_t i = 0; i < block.count(); ++i) {
    const float* const row = Row(errors_, block.weights[static_cast<size_t>(i)]);
    for (int64_t c = 0; c < columns_; ++c) {
      sum +=
          static_cast<double>(row[c]) * static_cast<double>(block.products[c * block.count() + i]);
    }
  }
  StoreErrors(block);
  return sum;
}

void GptqTile::StoreErrors(const GptqBlock& block) const {
  for (int64_t i = 0; i < block.count(); ++i) {
    const float* const row = Row(errors_, block.weights[static_cast<size_t>(i)]);
    for (int64_t c = 0; c < columns_; ++c) block.errors[c * block.count() + i] = row[c];
  }
}

void GptqTile::Store() {
  const int64_t padded = RoundUp(k_, kPackRun);
  for (int64_t group = 0; group < problem_.groups; ++group) {
    for (int64_t c = 0; c < columns_; ++c) {
      StoreParameters(parameters_[static_cast<size_t>(group * kColumns + c)],
                      group * spec_.n + n0_ + c, problem_.buffer);
    }
  }
  PackColumns(GetFormatInfo(spec_.format).bits, {codes_.data(), padded, k_, columns_},
              static_cast<uint32_t*>(problem_.buffer->codes) + n0_, spec_.n);
}

}  // namespace marlin
