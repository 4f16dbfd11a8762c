#include "quantize/gptq.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/checked.h"
#include "base/function_ref.h"
#include "base/macros.h"
#include "layout/sparse_24.h"
#include "marlin/layout.h"
#include "quantize/gptq_tile.h"
#include "quantize/rotate.h"

namespace marlin {
namespace {

/// Weights of a block: products with all errors are computed for so many weights at a time, and
/// brought up to date by every weight of the block.
constexpr int64_t kBlockWeights = 256;
/// Weights of a panel, which bounds the memory that they take in fp32.
constexpr int64_t kPanelWeights = int64_t{1} << 26;
constexpr int kRounds = 3;
constexpr int kScaleRounds = 2;

std::vector<int32_t> NaturalOrder(int64_t k) {
  std::vector<int32_t> order(static_cast<size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

/// The order of 2:4 sparsity's blocks whose first weights come first in `order`. A short block is
/// the last, so that blocks of a multiple of four weights hold whole ones.
std::vector<int32_t> PatternOrder(std::span<const int32_t> order) {
  const auto k = static_cast<int64_t>(order.size());
  const int64_t whole = k / kSparseBlock;
  std::vector<bool> seen(static_cast<size_t>(whole));
  std::vector<int32_t> patterns;
  const auto add = [&](int64_t block) {
    for (int64_t i = block * kSparseBlock; i < std::min(k, (block + 1) * kSparseBlock); ++i) {
      patterns.push_back(static_cast<int32_t>(i));
    }
  };
  for (const int32_t i : order) {
    const int64_t block = i / kSparseBlock;
    if (block == whole || seen[static_cast<size_t>(block)]) continue;
    seen[static_cast<size_t>(block)] = true;
    add(block);
  }
  add(whole);
  return patterns;
}

/// A visit of all weights, block by block, in an order, with a matrix [k, k] whose rows and columns
/// are in that order.
struct Pass {
  std::vector<int32_t> order;
  int64_t block_weights = 0;
  std::vector<std::vector<float>> factors;  ///< The matrix between the weights of each block.
  std::unique_ptr<PanelProducts::Matrix> matrix;

  int64_t blocks() const { return static_cast<int64_t>(factors.size()); }
  std::span<const int32_t> Weights(int64_t block) const {
    const std::span<const int32_t> all(order);
    const auto first = static_cast<size_t>(block * block_weights);
    return all.subspan(first, std::min(static_cast<size_t>(block_weights), all.size() - first));
  }
};

/// `matrix`: row-major, rows and columns in the pass's order.
Result<Pass> MakePass(PanelProducts& products, std::vector<int32_t> order, int64_t block_weights,
                      std::span<const float> matrix) {
  Pass pass;
  const auto k = static_cast<int64_t>(order.size());
  pass.order = std::move(order);
  pass.block_weights = block_weights;
  for (int64_t first = 0; first < k; first += block_weights) {
    const int64_t count = std::min(block_weights, k - first);
    std::vector<float>& factors = pass.factors.emplace_back();
    factors.reserve(static_cast<size_t>(count * count));
    for (int64_t i = first; i < first + count; ++i) {
      const auto row = matrix.begin() + i * k + first;
      factors.insert(factors.end(), row, row + count);
    }
  }
  MARLIN_ASSIGN_OR_RETURN(pass.matrix, products.Upload(matrix, k, block_weights));
  return pass;
}

/// The matrix's rows and columns in another order.
std::vector<float> Ordered(ThreadPool& pool, std::span<const float> matrix,
                           std::span<const int32_t> order) {
  const auto k = static_cast<int64_t>(order.size());
  std::vector<float> ordered(matrix.size());
  pool.Run(k, [&](int64_t i, int) {
    const float* const row = matrix.data() + order[static_cast<size_t>(i)] * k;
    for (int64_t j = 0; j < k; ++j) {
      ordered[static_cast<size_t>(i * k + j)] = row[order[static_cast<size_t>(j)]];
    }
  });
  return ordered;
}

/// The passes over a matrix.
struct Passes {
  Pass move;    ///< Empty without a correction.
  Pass sweep;   ///< With the feedback.
  Pass groups;  ///< With H; blocks hold whole groups.
  Pass descent;
};

Result<Passes> MakePasses(ThreadPool& pool, PanelProducts& products,
                          const InputCurvature& curvature, const InputCorrection* correction,
                          const WeightsSpec& spec, Sparsity sparsity) {
  Passes passes;
  const int64_t k = curvature.k;
  if (correction != nullptr) {
    MARLIN_ASSIGN_OR_RETURN(passes.move,
                            MakePass(products, NaturalOrder(k), kBlockWeights, correction->shift));
  }
  MARLIN_ASSIGN_OR_RETURN(passes.sweep,
                          MakePass(products, curvature.order, kBlockWeights, curvature.feedback));
  const int64_t groups = std::max(kBlockWeights / spec.group_size, int64_t{1});
  MARLIN_ASSIGN_OR_RETURN(passes.groups,
                          MakePass(products, NaturalOrder(k), std::min(k, groups * spec.group_size),
                                   curvature.hessian));
  std::vector<int32_t> order =
      sparsity == Sparsity::k24 ? PatternOrder(curvature.order) : curvature.order;
  const std::vector<float> ordered = Ordered(pool, curvature.hessian, order);
  MARLIN_ASSIGN_OR_RETURN(passes.descent,
                          MakePass(products, std::move(order), kBlockWeights, ordered));
  return passes;
}

/// Columns of a matrix that go through the passes together.
class Panel {
 public:
  Panel(ThreadPool& pool, PanelProducts& products, const GptqProblem& problem, int64_t n0,
        int64_t columns)
      : pool_(pool), products_(products), k_(problem.spec.k), columns_(columns) {
    for (int64_t c = 0; c < columns; c += kGptqColumns) tiles_.emplace_back(problem, n0 + c);
    panel_.resize(static_cast<size_t>(k_ * columns));
  }

  /// Loads the weights and, unless the pass is empty, moves them. Errors: kNonFiniteInput.
  Status Load(const MatrixView& matrix, const Pass& move);
  /// The largest span of a group.
  double Span();
  /// Chooses scales, zeros and codes, and stores them. Errors: a scale that overflows.
  Status Solve(const Passes& passes, const ScaleCoder& coder, Sparsity sparsity,
               int64_t* zeroed_groups);

 private:
  using Step = FunctionRef<void(GptqTile&, const GptqBlock&)>;
  /// Runs body(tile number, tile) for all tiles; the first tile's error, whichever thread found one
  /// first.
  Status ForTiles(FunctionRef<Status(int64_t, GptqTile&)> body);
  /// Takes a step for every block of a pass, whose products are those of the panel.
  Status Run(const Pass& pass, Step step);
  /// The same for the errors that the weights have now.
  Status RunOnErrors(const Pass& pass, Step step);

  ThreadPool& pool_;
  PanelProducts& products_;
  int64_t k_;
  int64_t columns_;
  std::vector<GptqTile> tiles_;
  std::vector<float> panel_;         ///< [columns, k]
  std::vector<float> of_block_;      ///< [columns, weights of a block]: products,
  std::vector<float> block_errors_;  ///< and errors.
};

Status Panel::ForTiles(FunctionRef<Status(int64_t, GptqTile&)> body) {
  std::vector<Status> results(tiles_.size());
  pool_.Run(static_cast<int64_t>(tiles_.size()), [&](int64_t i, int) {
    results[static_cast<size_t>(i)] = body(i, tiles_[static_cast<size_t>(i)]);
  });
  for (const Status& status : results) MARLIN_RETURN_IF_ERROR(status);
  return {};
}

Status Panel::Run(const Pass& pass, Step step) {
  MARLIN_RETURN_IF_ERROR(products_.SetPanel(panel_, k_));
  for (int64_t block = 0; block < pass.blocks(); ++block) {
    const std::span<const int32_t> weights = pass.Weights(block);
    const auto count = static_cast<int64_t>(weights.size());
    of_block_.resize(static_cast<size_t>(columns_ * count));
    block_errors_.resize(of_block_.size());
    MARLIN_RETURN_IF_ERROR(products_.Multiply(*pass.matrix, block, of_block_));
    const float* const factors = pass.factors[static_cast<size_t>(block)].data();
    MARLIN_RETURN_IF_ERROR(ForTiles([&](int64_t i, GptqTile& tile) -> Status {
      const int64_t first = i * kGptqColumns * count;
      step(tile, {weights, factors, of_block_.data() + first, block_errors_.data() + first});
      return {};
    }));
    if (block + 1 == pass.blocks()) break;
    MARLIN_RETURN_IF_ERROR(products_.ReplaceRows(block * pass.block_weights, count, block_errors_));
  }
  return {};
}

Status Panel::RunOnErrors(const Pass& pass, Step step) {
  MARLIN_RETURN_IF_ERROR(ForTiles([&](int64_t i, GptqTile& tile) -> Status {
    tile.GatherErrors(pass.order, panel_.data() + i * kGptqColumns * k_);
    return {};
  }));
  return Run(pass, step);
}

Status Panel::Load(const MatrixView& matrix, const Pass& move) {
  MARLIN_RETURN_IF_ERROR(
      ForTiles([&](int64_t, GptqTile& tile) -> Status { return tile.Load(matrix); }));
  if (move.blocks() == 0) return {};
  MARLIN_RETURN_IF_ERROR(ForTiles([&](int64_t i, GptqTile& tile) -> Status {
    tile.GatherWeights(move.order, panel_.data() + i * kGptqColumns * k_);
    return {};
  }));
  return Run(move, [](GptqTile& tile, const GptqBlock& block) { tile.Move(block); });
}

double Panel::Span() {
  std::vector<double> spans(tiles_.size());
  pool_.Run(static_cast<int64_t>(tiles_.size()), [&](int64_t i, int) {
    spans[static_cast<size_t>(i)] = tiles_[static_cast<size_t>(i)].Span();
  });
  return *std::max_element(spans.begin(), spans.end());
}

Status Panel::Solve(const Passes& passes, const ScaleCoder& coder, Sparsity sparsity,
                    int64_t* zeroed_groups) {
  std::vector<int64_t> zeroed(tiles_.size());
  MARLIN_RETURN_IF_ERROR(ForTiles([&](int64_t i, GptqTile& tile) -> Status {
    return tile.Begin(coder, &zeroed[static_cast<size_t>(i)]);
  }));
  for (const int64_t count : zeroed) *zeroed_groups += count;
  const auto sweep = [](GptqTile& tile, const GptqBlock& block) { tile.Sweep(block); };
  const auto adjust = [&](GptqTile& tile, const GptqBlock& block) {
    tile.AdjustGroups(coder, block);
  };
  const auto descend = [&](GptqTile& tile, const GptqBlock& block) {
    sparsity == Sparsity::k24 ? tile.DescendPatterns(block) : tile.Descend(block);
  };
  MARLIN_RETURN_IF_ERROR(RunOnErrors(passes.sweep, sweep));
  for (int round = 0; round < kRounds; ++round) {
    if (round < kScaleRounds) MARLIN_RETURN_IF_ERROR(RunOnErrors(passes.groups, adjust));
    MARLIN_RETURN_IF_ERROR(RunOnErrors(passes.descent, descend));
  }
  return ForTiles([](int64_t, GptqTile& tile) -> Status {
    tile.Store();
    return {};
  });
}

/// The columns of a panel.
int64_t PanelColumns(const WeightsSpec& spec) {
  const int64_t most = kPanelWeights / std::max(spec.k, int64_t{1}) / kGptqColumns * kGptqColumns;
  return std::clamp(most, kGptqColumns, RoundUp(spec.n, kGptqColumns));
}

/// Calls body(panel) for all panels of a matrix, whose weights are loaded and moved.
Status ForPanels(ThreadPool& pool, PanelProducts& products, const GptqProblem& problem,
                 const MatrixView& matrix, const Pass& move, FunctionRef<Status(Panel&)> body) {
  const int64_t columns = PanelColumns(problem.spec);
  for (int64_t n0 = 0; n0 < problem.spec.n; n0 += columns) {
    Panel panel(pool, products, problem, n0, std::min(columns, problem.spec.n - n0));
    MARLIN_RETURN_IF_ERROR(panel.Load(matrix, move));
    MARLIN_RETURN_IF_ERROR(body(panel));
  }
  return {};
}

}  // namespace

Result<QuantizedWeights> QuantizeGptq(ThreadPool& pool, PanelProducts& products,
                                      const TensorView& dense, const QuantizeOptions& options,
                                      const InputCurvature& curvature,
                                      const InputCorrection* correction, QuantizeReport* report) {
  MARLIN_RETURN_IF_ERROR(CheckDense("tensor '" + options.tensor_name + "'", dense));
  MARLIN_ASSIGN_OR_RETURN(WeightsSpec spec, QuantizedSpec(dense.shape(), options));
  spec.sparsity = Sparsity::kDense;  // The codes below are stored as dense ones at first.
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  buffer.weights.codebook = options.codebook;
  const Encoder encoder(spec.format, options.codebook);
  const ScaleRule rule(encoder, spec.has_zeros, options.fractional_zeros, options.e8m0_rule);
  const std::vector<float> importance = DiagonalOf(curvature);
  const GptqProblem problem{options, spec, encoder, rule, importance, &buffer, GroupCount(spec)};
  AlignedBuffer rotated;
  MatrixView matrix = ExpertMatrix(dense, 0);
  if (spec.input_hadamard > 0) {
    MARLIN_ASSIGN_OR_RETURN(rotated, RotateRows(pool, dense, spec.input_hadamard));
    matrix = ExpertMatrix(TensorView(rotated.As<float>(0), DType::kF32, {spec.k, spec.n}), 0);
  }
  MARLIN_ASSIGN_OR_RETURN(const Passes passes, MakePasses(pool, products, curvature, correction,
                                                          spec, options.sparsity));
  const auto for_panels = [&](FunctionRef<Status(Panel&)> body) {
    return ForPanels(pool, products, problem, matrix, passes.move, body);
  };
  if (buffer.global_scale != nullptr) {
    double span = 0;
    MARLIN_RETURN_IF_ERROR(for_panels([&](Panel& panel) -> Status {
      span = std::max(span, panel.Span());
      return {};
    }));
    buffer.global_scale[0] = rule.GlobalScale(span, true);
  }
  const ScaleCoder coder(spec.scale_type,
                         buffer.global_scale != nullptr ? buffer.global_scale[0] : 1.0F);
  int64_t zeroed_groups = 0;
  MARLIN_RETURN_IF_ERROR(for_panels(
      [&](Panel& panel) { return panel.Solve(passes, coder, options.sparsity, &zeroed_groups); }));
  if (report != nullptr) {
    *report = {};
    report->zeroed_groups = zeroed_groups;
  }
  if (options.sparsity == Sparsity::k24) return Prune24(buffer.weights);
  return std::move(buffer.weights);
}

}  // namespace marlin
