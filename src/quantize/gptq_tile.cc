#include "quantize/gptq_tile.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/packing.h"
#include "marlin/layout.h"
#include "quantize/gptq_steps.h"
#include "quantize/group_search.h"

namespace marlin {
namespace {

/// Chooses parameters [groups][kGptqColumns] of a column of the tile at n0, by its weights.
Status ChooseColumn(const GptqProblem& problem, const ScaleCoder& coder, int64_t n0, int64_t column,
                    std::span<const float> weights, std::span<const float> importance,
                    std::span<GroupParameters> parameters, int64_t* zeroed_groups) {
  const WeightsSpec& spec = problem.spec;
  const GroupContext context{problem.encoder, problem.rule, coder, spec.has_zeros};
  for (int64_t k = 0; k < spec.k; k += spec.group_size) {
    const int64_t count = std::min(spec.group_size, spec.k - k);
    const GroupRange range = RangeOf(weights.data() + k, count, spec.has_zeros);
    GroupParameters& chosen =
        parameters[static_cast<size_t>(k / spec.group_size * kGptqColumns + column)];
    chosen = SearchWeighted(context, range, weights.data() + k, importance.data() + k, count);
    if (chosen.scale.overflow) {
      return ScaleOverflow(problem.options.tensor_name, spec,
                           problem.rule.Span(range) / problem.rule.levels(), 0, k, n0 + column);
    }
    if (chosen.scale.value == 0.0F && range.amax > 0.0F) ++*zeroed_groups;
  }
  return {};
}

}  // namespace

GptqTile::GptqTile(const GptqProblem& problem, int64_t n0)
    : problem_(problem),
      spec_(problem.spec),
      k_(spec_.k),
      n0_(n0),
      columns_(std::min(kGptqColumns, spec_.n - n0)) {}

Status GptqTile::Load(const MatrixView& matrix) {
  weights_.assign(static_cast<size_t>(k_ * kGptqColumns), 0.0F);
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

Status GptqTile::Begin(const ScaleCoder& coder, int64_t* zeroed_groups) {
  if (problem_.options.sparsity == Sparsity::k24) {
    kept_ = ChooseKept(weights_, problem_.importance);
  }
  errors_.assign(weights_.size(), 0.0F);
  codes_.assign(static_cast<size_t>(kGptqColumns * RoundUp(k_, kPackRun)), 0);
  parameters_.assign(static_cast<size_t>(problem_.groups * kGptqColumns), {});
  std::vector<float> run(static_cast<size_t>(k_));
  std::vector<float> importance(problem_.importance.begin(), problem_.importance.end());
  for (int64_t c = 0; c < columns_; ++c) {
    for (int64_t k = 0; k < k_; ++k) run[static_cast<size_t>(k)] = Row(weights_, k)[c];
    // A pruned weight is 0 whatever the scale.
    for (size_t k = 0; k < importance.size() && !kept_.empty(); ++k) {
      const bool kept = kept_[k * kGptqColumns + static_cast<size_t>(c)] != 0;
      importance[k] = kept ? problem_.importance[k] : 0.0F;
    }
    MARLIN_RETURN_IF_ERROR(
        ChooseColumn(problem_, coder, n0_, c, run, importance, parameters_, zeroed_groups));
  }
  return {};
}

/// Sets the codes of row k to those nearest to the targets, and the row's errors.
void GptqTile::EncodeRow(int64_t k, const GptqLanes& targets) {
  GptqLanes scaled;
  const GroupParameters* const row = &Parameters(k, 0);
  for (int64_t c = 0; c < kGptqColumns; ++c) {
    const float scale = row[c].scale.value;
    scaled[c] = scale == 0.0F ? 0.0F : targets[c] / scale + row[c].zero;
  }
  uint8_t codes[kGptqColumns];
  problem_.encoder.Encode(scaled, kGptqColumns, 1.0F, 0.0F, codes);
  const int64_t padded = RoundUp(k_, kPackRun);
  const std::span<const float> values = problem_.encoder.values();
  for (int64_t c = 0; c < columns_; ++c) {
    const float scale = row[c].scale.value;
    const bool pruned = !kept_.empty() && kept_[static_cast<size_t>(k * kGptqColumns + c)] == 0;
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
    GptqLanes targets;
    steps.Take(i, i, targets);
    for (int64_t c = 0; c < kGptqColumns; ++c) targets[c] += Row(weights_, k)[c];
    const GptqLanes none = {};
    EncodeRow(k, targets);
    steps.Change(i, none, Row(errors_, k));
  }
  StoreErrors(block);
}

void GptqTile::DescendRow(const GptqBlock& block, int64_t i, Steps& steps) {
  const int64_t k = block.weights[static_cast<size_t>(i)];
  GptqLanes targets;
  steps.Take(i, i, targets);
  const float own = block.Factors(i)[i];
  const float* const weights = Row(weights_, k);
  GptqLanes before;
  std::copy_n(Row(errors_, k), kGptqColumns, before);
  for (int64_t c = 0; c < kGptqColumns; ++c) {
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
      StoreParameters(parameters_[static_cast<size_t>(group * kGptqColumns + c)],
                      group * spec_.n + n0_ + c, problem_.buffer);
    }
  }
  PackColumns(GetFormatInfo(spec_.format).bits, {codes_.data(), padded, k_, columns_},
              static_cast<uint32_t*>(problem_.buffer->codes) + n0_, spec_.n);
}

}  // namespace marlin
