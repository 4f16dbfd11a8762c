#include "quantize/gptq.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
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

/// Weights of a block: products with all errors are computed for a block at a time, and each weight
/// of the block then updates them.
constexpr int64_t kBlockWeights = 256;
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

/// A visit to all weights in an order, block by block, with a matrix [k, k] in the same order.
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

/// A matrix being quantized.
struct Job {
  Job(const GptqMatrix& from, const InputCurvature& curvature)
      : options(from.options), importance(DiagonalOf(curvature)) {}

  /// Checks the matrix, allocates its weights and, with Hadamard blocks, rotates it.
  Status Begin(ThreadPool& pool, const TensorView& dense);
  void SetGlobalScale(double span);
  Result<GptqResult> Finish();

  const QuantizeOptions& options;
  std::vector<float> importance;
  WeightsSpec spec;
  WeightsBuffer buffer;
  std::optional<Encoder> encoder;
  std::optional<ScaleRule> rule;
  std::optional<GptqProblem> problem;
  AlignedBuffer rotated;
  MatrixView matrix;
  std::optional<ScaleCoder> coder;
  int64_t zeroed_groups = 0;
  double error = 0;
};

Status Job::Begin(ThreadPool& pool, const TensorView& dense) {
  MARLIN_RETURN_IF_ERROR(CheckDense(TensorLabel(options.tensor_name), dense));
  MARLIN_ASSIGN_OR_RETURN(spec, QuantizedSpec(dense.shape(), options));
  spec.sparsity = Sparsity::kDense;  // The codes are stored as dense ones at first.
  MARLIN_ASSIGN_OR_RETURN(buffer, AllocateWeights(spec));
  buffer.weights.codebook = options.codebook;
  encoder.emplace(spec.format, options.codebook);
  rule.emplace(*encoder, spec.has_zeros, options.fractional_zeros, options.e8m0_rule);
  problem.emplace(
      GptqProblem{options, spec, *encoder, *rule, importance, &buffer, GroupCount(spec)});
  coder.emplace(spec.scale_type);
  matrix = MatrixOfExpert(dense, 0);
  if (spec.input_hadamard == 0) return {};
  MARLIN_ASSIGN_OR_RETURN(rotated, RotateRows(pool, dense, spec.input_hadamard));
  matrix = MatrixOfExpert(TensorView(rotated.As<float>(0), DType::kF32, {spec.k, spec.n}), 0);
  return {};
}

void Job::SetGlobalScale(double span) {
  buffer.global_scale[0] = rule->GlobalScale(span, true);
  coder.emplace(spec.scale_type, buffer.global_scale[0]);
}

Result<GptqResult> Job::Finish() {
  GptqResult result;
  result.zeroed_groups = zeroed_groups;
  result.error = error;
  if (options.sparsity == Sparsity::k24) {
    MARLIN_ASSIGN_OR_RETURN(result.weights, Prune24(buffer.weights));
  } else {
    result.weights = std::move(buffer.weights);
  }
  return result;
}

/// Some columns of a matrix in a panel.
struct PanelTile {
  PanelTile(Job* of, int64_t n0, int64_t first) : job(of), tile(*of->problem, n0), column(first) {}

  Job* job;
  GptqTile tile;
  int64_t column;  ///< The first one's place in the panel.
  double error = 0;
};

/// Columns of matrices that go through the passes together.
class Panel {
 public:
  Panel(ThreadPool& pool, PanelProducts& products, int64_t k)
      : pool_(pool), products_(products), k_(k) {}

  int64_t weights() const { return columns_ * k_; }
  void Add(Job* job, int64_t n0) {
    tiles_.emplace_back(job, n0, columns_);
    columns_ += tiles_.back().tile.columns();
  }

  /// Loads the weights and, unless the pass is empty, moves them. Errors: kNonFiniteInput.
  Status Load(const Pass& move);
  /// Raises the span of every job to the largest span of its groups in this panel.
  void AddSpans(std::span<const std::unique_ptr<Job>> jobs, std::vector<double>* spans);
  /// Chooses scales, zeros and codes, and stores them. Errors: a scale that overflows.
  Status Solve(const Passes& passes, Sparsity sparsity);
  /// Adds the errors of the columns to their jobs'.
  Status MeasureError(const Passes& passes);

 private:
  using Step = FunctionRef<void(PanelTile&, const GptqBlock&)>;
  /// Runs body(tile number, tile) for all tiles; the first tile's error, whichever thread found one
  /// first.
  Status ForTiles(FunctionRef<Status(size_t, PanelTile&)> body);
  /// Takes a step for every block of a pass, with the products of the panel.
  Status Run(const Pass& pass, Step step);
  /// As Run, with the products of the current errors.
  Status RunOnErrors(const Pass& pass, Step step);

  ThreadPool& pool_;
  PanelProducts& products_;
  int64_t k_;
  int64_t columns_ = 0;
  std::vector<PanelTile> tiles_;
  std::vector<float> panel_;         ///< [columns, k]
  std::vector<float> of_block_;      ///< [columns, weights of a block]: products,
  std::vector<float> block_errors_;  ///< and errors.
};

Status Panel::ForTiles(FunctionRef<Status(size_t, PanelTile&)> body) {
  std::vector<Status> results(tiles_.size());
  pool_.Run(static_cast<int64_t>(tiles_.size()), [&](int64_t i, int) {
    const auto at = static_cast<size_t>(i);
    results[at] = body(at, tiles_[at]);
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
    MARLIN_RETURN_IF_ERROR(ForTiles([&](size_t, PanelTile& each) -> Status {
      const int64_t first = each.column * count;
      step(each, {weights, factors, of_block_.data() + first, block_errors_.data() + first});
      return {};
    }));
    if (block + 1 == pass.blocks()) break;
    MARLIN_RETURN_IF_ERROR(products_.ReplaceRows(block * pass.block_weights, count, block_errors_));
  }
  return {};
}

Status Panel::RunOnErrors(const Pass& pass, Step step) {
  MARLIN_RETURN_IF_ERROR(ForTiles([&](size_t, PanelTile& each) -> Status {
    each.tile.GatherErrors(pass.order, panel_.data() + each.column * k_);
    return {};
  }));
  return Run(pass, step);
}

Status Panel::Load(const Pass& move) {
  panel_.resize(static_cast<size_t>(k_ * columns_));
  MARLIN_RETURN_IF_ERROR(ForTiles(
      [&](size_t, PanelTile& each) -> Status { return each.tile.Load(each.job->matrix); }));
  if (move.blocks() == 0) return {};
  MARLIN_RETURN_IF_ERROR(ForTiles([&](size_t, PanelTile& each) -> Status {
    each.tile.GatherWeights(move.order, panel_.data() + each.column * k_);
    return {};
  }));
  return Run(move, [](PanelTile& each, const GptqBlock& block) { each.tile.Move(block); });
}

void Panel::AddSpans(std::span<const std::unique_ptr<Job>> jobs, std::vector<double>* spans) {
  std::vector<double> of_tiles(tiles_.size());
  pool_.Run(static_cast<int64_t>(tiles_.size()), [&](int64_t i, int) {
    of_tiles[static_cast<size_t>(i)] = tiles_[static_cast<size_t>(i)].tile.Span();
  });
  for (size_t job = 0; job < jobs.size(); ++job) {
    for (size_t i = 0; i < tiles_.size(); ++i) {
      double& span = (*spans)[job];
      if (tiles_[i].job == jobs[job].get()) span = std::max(span, of_tiles[i]);
    }
  }
}

Status Panel::Solve(const Passes& passes, Sparsity sparsity) {
  std::vector<int64_t> zeroed(tiles_.size());
  MARLIN_RETURN_IF_ERROR(ForTiles([&](size_t i, PanelTile& each) -> Status {
    return each.tile.Begin(*each.job->coder, &zeroed[i]);
  }));
  for (size_t i = 0; i < tiles_.size(); ++i) tiles_[i].job->zeroed_groups += zeroed[i];
  const auto sweep = [](PanelTile& each, const GptqBlock& block) { each.tile.Sweep(block); };
  const auto adjust = [](PanelTile& each, const GptqBlock& block) {
    each.tile.AdjustGroups(*each.job->coder, block);
  };
  const auto descend = [&](PanelTile& each, const GptqBlock& block) {
    sparsity == Sparsity::k24 ? each.tile.DescendPatterns(block) : each.tile.Descend(block);
  };
  MARLIN_RETURN_IF_ERROR(RunOnErrors(passes.sweep, sweep));
  for (int round = 0; round < kRounds; ++round) {
    if (round < kScaleRounds) MARLIN_RETURN_IF_ERROR(RunOnErrors(passes.groups, adjust));
    MARLIN_RETURN_IF_ERROR(RunOnErrors(passes.descent, descend));
  }
  return ForTiles([](size_t, PanelTile& each) -> Status {
    each.tile.Store();
    return {};
  });
}

Status Panel::MeasureError(const Passes& passes) {
  MARLIN_RETURN_IF_ERROR(RunOnErrors(passes.groups, [](PanelTile& each, const GptqBlock& block) {
    each.error += each.tile.ErrorOf(block);
  }));
  for (const PanelTile& each : tiles_) each.job->error += each.error;
  return {};
}

/// Matrices that go through the passes, panel by panel.
class Panels {
 public:
  Panels(ThreadPool& pool, PanelProducts& products, std::span<const std::unique_ptr<Job>> jobs,
         const Pass& move, int64_t most_weights)
      : pool_(pool), products_(products), jobs_(jobs), move_(move), most_weights_(most_weights) {}

  /// Calls body(panel) for all panels in turn, with weights that are loaded and moved.
  Status ForEach(FunctionRef<Status(Panel&)> body) const;
  /// Chooses the global scales of matrices that have one, by all of their weights.
  Status ChooseGlobalScales() const;

 private:
  ThreadPool& pool_;
  PanelProducts& products_;
  std::span<const std::unique_ptr<Job>> jobs_;
  const Pass& move_;
  int64_t most_weights_;  ///< The limit of a panel, which has one tile at least.
};

Status Panels::ForEach(FunctionRef<Status(Panel&)> body) const {
  const int64_t k = jobs_.front()->spec.k;
  std::optional<Panel> panel;
  const auto run = [&]() -> Status {
    MARLIN_RETURN_IF_ERROR(panel->Load(move_));
    MARLIN_RETURN_IF_ERROR(body(*panel));
    panel.reset();
    return {};
  };
  for (const std::unique_ptr<Job>& job : jobs_) {
    for (int64_t n0 = 0; n0 < job->spec.n; n0 += kGptqColumns) {
      const bool full = panel && panel->weights() + kGptqColumns * k > most_weights_;
      if (full) MARLIN_RETURN_IF_ERROR(run());
      if (!panel) panel.emplace(pool_, products_, k);
      panel->Add(job.get(), n0);
    }
  }
  return panel ? run() : Status();
}

Status Panels::ChooseGlobalScales() const {
  const auto global = [](const std::unique_ptr<Job>& job) {
    return job->buffer.global_scale != nullptr;
  };
  if (std::none_of(jobs_.begin(), jobs_.end(), global)) return {};
  std::vector<double> spans(jobs_.size());
  MARLIN_RETURN_IF_ERROR(ForEach([&](Panel& panel) -> Status {
    panel.AddSpans(jobs_, &spans);
    return {};
  }));
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (global(jobs_[i])) jobs_[i]->SetGlobalScale(spans[i]);
  }
  return {};
}

}  // namespace

Result<std::vector<GptqResult>> QuantizeGptq(ThreadPool& pool, PanelProducts& products,
                                             std::span<const GptqMatrix> matrices,
                                             const InputCurvature& curvature,
                                             const InputCorrection* correction,
                                             const GptqSettings& settings) {
  std::vector<std::unique_ptr<Job>> jobs;
  for (const GptqMatrix& matrix : matrices) {
    jobs.push_back(std::make_unique<Job>(matrix, curvature));
    MARLIN_RETURN_IF_ERROR(jobs.back()->Begin(pool, matrix.dense));
  }
  std::vector<GptqResult> results;
  if (jobs.empty()) return results;
  const Sparsity sparsity = jobs.front()->options.sparsity;
  MARLIN_ASSIGN_OR_RETURN(const Passes passes, MakePasses(pool, products, curvature, correction,
                                                          jobs.front()->spec, sparsity));
  const Panels panels(pool, products, jobs, passes.move, settings.panel_weights);
  MARLIN_RETURN_IF_ERROR(panels.ChooseGlobalScales());
  const auto solve = [&](Panel& panel) -> Status {
    MARLIN_RETURN_IF_ERROR(panel.Solve(passes, sparsity));
    return settings.measures_error ? panel.MeasureError(passes) : Status();
  };
  MARLIN_RETURN_IF_ERROR(panels.ForEach(solve));
  for (const std::unique_ptr<Job>& job : jobs) {
    MARLIN_ASSIGN_OR_RETURN(GptqResult result, job->Finish());
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace marlin
