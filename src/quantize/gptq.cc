#include "quantize/gptq.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/packing.h"
#include "layout/sparse_24.h"
#include "marlin/layout.h"
#include "quantize/column_tile.h"
#include "quantize/encoder.h"
#include "quantize/group_search.h"
#include "quantize/quantizer.h"
#include "quantize/rotate.h"
#include "quantize/sparse_block.h"

namespace marlin {
namespace {

constexpr int64_t kColumns = kGptqColumns;
constexpr int kRounds = 3;
constexpr int kScaleRounds = 2;

using Lanes = GptqLanes;

/// sums[c] = sum over j < count of factors[j] * rows[j][c].
void Combine(const float* factors, const float* rows, int64_t count, Lanes& sums) {
  float local[kColumns] = {};
  for (int64_t j = 0; j < count; ++j) {
    const float factor = factors[j];
    const float* const row = rows + j * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) local[c] += factor * row[c];
  }
  std::copy_n(local, kColumns, sums);
}

/// A matrix and what its tasks share.
struct Problem {
  const QuantizeOptions& options;
  const WeightsSpec& spec;
  const Encoder& encoder;
  const ScaleRule& rule;
  const InputCurvature& curvature;
  const InputCorrection* correction;  ///< Null: the weights are not moved.
  std::span<const float> importance;  ///< The diagonal of H.
  WeightsBuffer* buffer;
  int64_t groups;
};

/// Columns [n0, n0 + columns) of the matrix. Arrays [k][kColumns] hold k rows of lanes; lanes
/// beyond `columns` are zero.
class TileSolver {
 public:
  TileSolver(const Problem& problem, int64_t n0)
      : problem_(problem),
        spec_(problem.spec),
        k_(spec_.k),
        n0_(n0),
        columns_(std::min(kColumns, spec_.n - n0)),
        weights_(static_cast<size_t>(k_ * kColumns)) {}

  /// Loads the weights and moves them. Errors: kNonFiniteInput.
  Status Load(const MatrixView& matrix);
  /// The largest span of a group.
  double Span() const;
  /// Chooses scales, zeros and codes, and stores them. Errors: a scale that overflows.
  Status Solve(float global_scale, int64_t* zeroed_groups);

 private:
  float* Row(std::vector<float>& rows, int64_t k) const { return rows.data() + k * kColumns; }
  const float* Row(const std::vector<float>& rows, int64_t k) const {
    return rows.data() + k * kColumns;
  }
  GroupParameters& Parameters(int64_t k, int64_t column) {
    return parameters_[static_cast<size_t>((k / spec_.group_size) * kColumns + column)];
  }
  void Correct();
  Status ChooseParameters(const GroupContext& context, int64_t* zeroed_groups);
  void EncodeRow(int64_t k, const Lanes& targets);
  void Sweep();
  void AdjustGroups(const ScaleCoder& coder);
  void AdjustGroup(const ScaleCoder& coder, int64_t group);
  void AdjustColumn(const ScaleCoder& coder, int64_t group, int64_t column, const float* gradients);
  void Descend();
  void DescendRow(int64_t k);
  void ChooseKept();
  void DescendBlock(int64_t first);
  void DescendBlocks();
  void Store();

  const Problem& problem_;
  const WeightsSpec& spec_;
  int64_t k_;
  int64_t n0_;
  int64_t columns_;
  std::vector<float> weights_;  ///< [k][kColumns]
  std::vector<float> errors_;   ///< [k][kColumns]: weight minus its decoded code.
  std::vector<uint8_t> codes_;  ///< [kColumns][padded k]
  std::vector<uint8_t> kept_;   ///< [k][kColumns]: 0 where 2:4 prunes; empty for dense weights.
  std::vector<GroupParameters> parameters_;  ///< [groups][kColumns]
};

Status TileSolver::Load(const MatrixView& matrix) {
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
  if (problem_.correction != nullptr) Correct();
  return {};
}

void TileSolver::Correct() {
  std::vector<float> moved(weights_.size());
  for (int64_t k = 0; k < k_; ++k) {
    Lanes shift;
    Combine(problem_.correction->shift.data() + k * k_, weights_.data(), k_, shift);
    for (int64_t c = 0; c < kColumns; ++c) Row(moved, k)[c] = Row(weights_, k)[c] + shift[c];
  }
  weights_ = std::move(moved);
}

double TileSolver::Span() const {
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

Status TileSolver::ChooseParameters(const GroupContext& context, int64_t* zeroed_groups) {
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
void TileSolver::EncodeRow(int64_t k, const Lanes& targets) {
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

void TileSolver::Sweep() {
  // The errors in the order in which they arise.
  std::vector<float> earlier(weights_.size());
  const std::vector<int32_t>& order = problem_.curvature.order;
  for (int64_t i = 0; i < k_; ++i) {
    const int64_t k = order[static_cast<size_t>(i)];
    Lanes targets;
    Combine(problem_.curvature.feedback.data() + i * k_, earlier.data(), i, targets);
    for (int64_t c = 0; c < kColumns; ++c) targets[c] += Row(weights_, k)[c];
    EncodeRow(k, targets);
    std::copy_n(Row(errors_, k), kColumns, Row(earlier, i));
  }
}

/// Moves a group's scale, then its zero point, to the minimum of the error as far as their types
/// allow, if that lowers it. gradients [rows of the group][kColumns]: H times the errors.
void TileSolver::AdjustColumn(const ScaleCoder& coder, int64_t group, int64_t column,
                              const float* gradients) {
  const int64_t k0 = group * spec_.group_size;
  const int64_t count = std::min(spec_.group_size, k_ - k0);
  const int64_t padded = RoundUp(k_, kPackRun);
  GroupParameters& parameters = Parameters(k0, column);
  const float scale = parameters.scale.value;
  if (scale == 0.0F) return;
  const std::span<const float> values = problem_.encoder.values();
  const bool move_zero = spec_.has_zeros && problem_.options.fractional_zeros;
  // Along u = value - zero the scale moves, along -1 the zero point.
  double slope = 0;
  double curve = 0;
  double zero_slope = 0;
  double zero_curve = 0;
  double mixed = 0;
  std::vector<float> u(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    u[static_cast<size_t>(i)] =
        values[codes_[static_cast<size_t>(column * padded + k0 + i)]] - parameters.zero;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float* const row = problem_.curvature.hessian.data() + (k0 + i) * k_ + k0;
    float hu = 0;
    float h1 = 0;
    for (int64_t j = 0; j < count; ++j) {
      hu += row[j] * u[static_cast<size_t>(j)];
      h1 += row[j];
    }
    const double own = u[static_cast<size_t>(i)];
    const double gradient = gradients[i * kColumns + column];
    slope += gradient * own;
    curve += own * static_cast<double>(hu);
    zero_slope -= gradient;
    zero_curve += static_cast<double>(h1);
    mixed -= static_cast<double>(hu);
  }
  double scale_step = 0;
  if (curve > 0.0) {
    const StoredScale moved =
        coder.Round(std::max(static_cast<float>(static_cast<double>(scale) + slope / curve), 0.0F));
    const double step = static_cast<double>(moved.value) - static_cast<double>(scale);
    if (!moved.overflow && moved.value > 0.0F && step * (step * curve - 2 * slope) < 0.0) {
      parameters.scale = moved;
      scale_step = step;
    }
  }
  // With the new scale, a step z of the zero changes every weight by -scale * z.
  double zero_step = 0;
  const double new_scale = parameters.scale.value;
  if (move_zero && zero_curve > 0.0) {
    const double rest = zero_slope - scale_step * mixed;
    const float moved = problem_.rule.RoundZero(
        static_cast<float>(static_cast<double>(parameters.zero) + rest / zero_curve / new_scale));
    const double step =
        new_scale * (static_cast<double>(moved) - static_cast<double>(parameters.zero));
    if (step * (step * zero_curve - 2 * rest) < 0.0) {
      parameters.zero = moved;
      zero_step = step;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    Row(errors_, k0 + i)[column] -=
        static_cast<float>(scale_step * static_cast<double>(u[static_cast<size_t>(i)]) - zero_step);
  }
}

void TileSolver::AdjustGroup(const ScaleCoder& coder, int64_t group) {
  const int64_t k0 = group * spec_.group_size;
  const int64_t count = std::min(spec_.group_size, k_ - k0);
  std::vector<float> gradients(static_cast<size_t>(count * kColumns));
  for (int64_t i = 0; i < count; ++i) {
    Lanes sums;
    Combine(problem_.curvature.hessian.data() + (k0 + i) * k_, errors_.data(), k_, sums);
    std::copy_n(sums, kColumns, Row(gradients, i));
  }
  for (int64_t c = 0; c < columns_; ++c) AdjustColumn(coder, group, c, gradients.data());
}

void TileSolver::AdjustGroups(const ScaleCoder& coder) {
  for (int64_t group = 0; group < problem_.groups; ++group) AdjustGroup(coder, group);
}

void TileSolver::DescendRow(int64_t k) {
  const float* const row = problem_.curvature.hessian.data() + k * k_;
  Lanes targets;
  Combine(row, errors_.data(), k_, targets);
  const float* const weights = Row(weights_, k);
  const float* const errors = Row(errors_, k);
  for (int64_t c = 0; c < kColumns; ++c) {
    targets[c] = weights[c] - errors[c] + targets[c] / row[k];
  }
  EncodeRow(k, targets);
}

void TileSolver::Descend() {
  for (const int32_t k : problem_.curvature.order) DescendRow(k);
}

/// Keeps the two weights of every block of largest importance times square; ties go to the lower
/// k. The descent revises the choice.
void TileSolver::ChooseKept() {
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
void TileSolver::DescendBlock(int64_t first) {
  const int64_t count = std::min(kSparseBlock, k_ - first);
  float h[kSparseBlock][kSparseBlock];
  Lanes pull[kSparseBlock];  // The gradient of the errors outside the block.
  for (int64_t i = 0; i < count; ++i) {
    const float* const row = problem_.curvature.hessian.data() + (first + i) * k_;
    Combine(row, errors_.data(), k_, pull[i]);
    for (int64_t j = 0; j < count; ++j) {
      h[i][j] = row[first + j];
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
    std::copy_n(best.errors[i], kColumns, Row(errors_, first + i));
    for (int64_t c = 0; c < columns_; ++c) {
      codes_[static_cast<size_t>(c * padded + first + i)] = best.codes[i][c];
    }
  }
}

void TileSolver::DescendBlocks() {
  std::vector<bool> seen(static_cast<size_t>(CeilDivide(k_, kSparseBlock)));
  for (const int32_t k : problem_.curvature.order) {
    const int64_t block = k / kSparseBlock;
    if (k_ - block * kSparseBlock <= 2) {
      DescendRow(k);  // Both weights of a last short block are kept.
    } else if (!seen[static_cast<size_t>(block)]) {
      seen[static_cast<size_t>(block)] = true;
      DescendBlock(block * kSparseBlock);
    }
  }
}

void TileSolver::Store() {
  const int64_t padded = RoundUp(k_, kPackRun);
  for (int64_t group = 0; group < problem_.groups; ++group) {
    for (int64_t c = 0; c < columns_; ++c) {
      StoreParameters(Parameters(group * spec_.group_size, c), group * spec_.n + n0_ + c,
                      problem_.buffer);
    }
  }
  PackColumns(GetFormatInfo(spec_.format).bits, {codes_.data(), padded, k_, columns_},
              static_cast<uint32_t*>(problem_.buffer->codes) + n0_, spec_.n);
}

Status TileSolver::Solve(float global_scale, int64_t* zeroed_groups) {
  const ScaleCoder coder(spec_.scale_type, global_scale);
  const bool sparse = problem_.options.sparsity == Sparsity::k24;
  if (sparse) ChooseKept();
  MARLIN_RETURN_IF_ERROR(
      ChooseParameters({problem_.encoder, problem_.rule, coder, spec_.has_zeros}, zeroed_groups));
  errors_.assign(weights_.size(), 0.0F);
  codes_.assign(static_cast<size_t>(kColumns * RoundUp(k_, kPackRun)), 0);
  Sweep();
  for (int round = 0; round < kRounds; ++round) {
    if (round < kScaleRounds) AdjustGroups(coder);
    sparse ? DescendBlocks() : Descend();
  }
  Store();
  return {};
}

/// Runs body(tile) for all tiles; the first tile's error, whichever thread found one first.
template <typename Body>
Status ForEachTile(ThreadPool& pool, int64_t tiles, Body body) {
  std::vector<Status> results(static_cast<size_t>(tiles));
  pool.Run(tiles, [&](int64_t tile, int) { results[static_cast<size_t>(tile)] = body(tile); });
  for (const Status& status : results) MARLIN_RETURN_IF_ERROR(status);
  return {};
}

Result<QuantizedWeights> Run(ThreadPool& pool, const TensorView& dense,
                             const QuantizeOptions& options, const InputCurvature& curvature,
                             const InputCorrection* correction, std::span<const float> importance,
                             QuantizeReport* report) {
  MARLIN_RETURN_IF_ERROR(CheckDense("tensor '" + options.tensor_name + "'", dense));
  MARLIN_ASSIGN_OR_RETURN(WeightsSpec spec, QuantizedSpec(dense.shape(), options));
  spec.sparsity = Sparsity::kDense;  // The codes below are stored as dense ones at first.
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  buffer.weights.codebook = options.codebook;
  const Encoder encoder(spec.format, options.codebook);
  const ScaleRule rule(encoder, spec.has_zeros, options.fractional_zeros, options.e8m0_rule);
  const Problem problem{options,    spec,    encoder,         rule, curvature, correction,
                        importance, &buffer, GroupCount(spec)};
  const int64_t tiles = CeilDivide(spec.n, kColumns);
  AlignedBuffer rotated;
  MatrixView matrix = ExpertMatrix(dense, 0);
  if (spec.input_hadamard > 0) {
    MARLIN_ASSIGN_OR_RETURN(rotated, RotateRows(pool, dense, spec.input_hadamard));
    matrix = ExpertMatrix(TensorView(rotated.As<float>(0), DType::kF32, {spec.k, spec.n}), 0);
  }
  if (buffer.global_scale != nullptr) {
    std::vector<double> spans(static_cast<size_t>(tiles));
    const auto measure = [&](int64_t tile) {
      TileSolver solver(problem, tile * kColumns);
      Status status = solver.Load(matrix);
      if (status.ok()) spans[static_cast<size_t>(tile)] = solver.Span();
      return status;
    };
    MARLIN_RETURN_IF_ERROR(ForEachTile(pool, tiles, measure));
    const double span = *std::max_element(spans.begin(), spans.end());
    buffer.global_scale[0] = rule.GlobalScale(span, true);
  }
  const float global_scale = buffer.global_scale != nullptr ? buffer.global_scale[0] : 1.0F;
  std::vector<int64_t> zeroed(static_cast<size_t>(tiles));
  const auto solve = [&](int64_t tile) {
    TileSolver solver(problem, tile * kColumns);
    const Status status = solver.Load(matrix);
    return status.ok() ? solver.Solve(global_scale, &zeroed[static_cast<size_t>(tile)]) : status;
  };
  MARLIN_RETURN_IF_ERROR(ForEachTile(pool, tiles, solve));
  if (report != nullptr) {
    *report = {};
    for (const int64_t count : zeroed) report->zeroed_groups += count;
  }
  if (options.sparsity == Sparsity::k24) return Prune24(buffer.weights);
  return std::move(buffer.weights);
}

}  // namespace

Result<QuantizedWeights> QuantizeGptq(ThreadPool& pool, const TensorView& dense,
                                      const QuantizeOptions& options,
                                      const InputCurvature& curvature,
                                      const InputCorrection* correction, QuantizeReport* report) {
  return Run(pool, dense, options, curvature, correction, DiagonalOf(curvature), report);
}

}  // namespace marlin
