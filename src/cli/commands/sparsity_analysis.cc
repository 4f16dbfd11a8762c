#include "cli/commands/sparsity_analysis.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "base/view_checks.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/source_layout.h"
#include "layout/sparse_24.h"
#include "quantize/column_tile.h"

namespace marlin::cli {
namespace {

/// The sums of one column of k weights.
PruneLoss LossOf(const float* w, int64_t k) {
  PruneLoss loss;
  loss.weights = k;
  for (int64_t first = 0; first < k; first += kSparseBlock) {
    const int64_t count = std::min(kSparseBlock, k - first);
    double squares[kSparseBlock] = {};
    for (int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<double>(w[first + i]);
      squares[i] = value * value;
      loss.squares += squares[i];
      loss.zeros += value == 0.0 ? 1 : 0;
    }
    std::sort(std::begin(squares), std::end(squares), std::greater<>());
    loss.pruned_squares += squares[2] + squares[3];
  }
  return loss;
}

/// Every matrix [k, n] of a view [k, n] or [experts, k, n], with any strides, as of its
/// transpose.
PruneLoss LossOf(ThreadPool& pool, const TensorView& view) {
  const int64_t experts = view.rank() == 3 ? view.dim(0) : 1;
  const int64_t k = view.dim(view.rank() - 2);
  const int64_t n = view.dim(view.rank() - 1);
  const int64_t tiles = CeilDivide(n, kTileColumns);
  std::vector<PruneLoss> losses(static_cast<size_t>(experts * tiles));
  pool.Run(experts * tiles, [&](int64_t task, int) {
    const int64_t n0 = task % tiles * kTileColumns;
    const TileRange range{0, k, n0, std::min(kTileColumns, n - n0)};
    std::vector<float> columns(static_cast<size_t>(range.columns * k));
    LoadColumns(MatrixOfExpert(view, task / tiles), range, columns.data(), k);
    for (int64_t c = 0; c < range.columns; ++c) {
      losses[static_cast<size_t>(task)].Add(LossOf(columns.data() + c * k, k));
    }
  });
  PruneLoss total;
  for (const PruneLoss& loss : losses) total.Add(loss);
  return total;
}

/// The same memory with k and n exchanged.
TensorView ExchangeLastTwo(const TensorView& view) {
  if (view.rank() == 2) return view.Transposed();
  return {view.data(),
          view.dtype(),
          {view.dim(0), view.dim(2), view.dim(1)},
          {view.stride(0), view.stride(2), view.stride(1)}};
}

}  // namespace

void PruneLoss::Add(const PruneLoss& other) {
  weights += other.weights;
  zeros += other.zeros;
  squares += other.squares;
  pruned_squares += other.pruned_squares;
}

double PruneLoss::RelativeError() const {
  return squares == 0.0 ? 0.0 : std::sqrt(pruned_squares / squares);
}

Result<std::vector<AnalyzedMatrix>> AnalyzeSparsity(const Checkpoint& checkpoint,
                                                    const Progress& progress) {
  if (!checkpoint.quant_method().empty()) {
    return Invalid(fmt::format("{}: is quantized, with {}; analyze its source",
                               Printable(checkpoint.path()), Printable(checkpoint.quant_method())));
  }
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  const MixedPrecisionConfig recipe = MixedPrecisionConfig::DefaultMoe();
  std::vector<const TensorInfo*> chosen;
  int64_t total = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (!IsFloat(tensor.dtype) || recipe.Choose(tensor.name, tensor.shape).keep) continue;
    if (IsModelEnd(ClassifyTensor(tensor.name))) continue;  // --sparsity does not prune them.
    chosen.push_back(&tensor);
    total += tensor.shape.ElementCount();
  }
  ThreadPool pool(0);
  std::vector<AnalyzedMatrix> matrices;
  int64_t done = 0;
  for (const TensorInfo* tensor : chosen) {
    MARLIN_ASSIGN_OR_RETURN(const TensorView stored, checkpoint.Tensor(tensor->name));
    MARLIN_ASSIGN_OR_RETURN(const SourceLayout layout, SourceLayoutOf(source, *tensor));
    const bool out_in = layout == SourceLayout::kOutIn;
    AnalyzedMatrix matrix{tensor->name, ClassifyTensor(tensor->name),
                          LossOf(pool, out_in ? ExchangeLastTwo(stored) : stored)};
    if (!std::isfinite(matrix.loss.squares)) {
      return Status(Code::kNonFiniteInput,
                    fmt::format("tensor \"{}\": NaN or Inf", Printable(tensor->name)));
    }
    matrices.push_back(std::move(matrix));
    done += tensor->shape.ElementCount();
    if (progress) progress(done, total);
  }
  return matrices;
}

}  // namespace marlin::cli
