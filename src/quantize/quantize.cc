#include "marlin/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <span>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/thread_pool.h"
#include "layout/packing.h"
#include "layout/sparse_24.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "quantize/column_tile.h"
#include "quantize/group_search.h"
#include "quantize/quantizer.h"
#include "quantize/rotate.h"

namespace marlin {
namespace {

/// One Quantize call after its checks: the matrix is processed in tiles of columns, each tile in
/// chunks of k that hold whole groups and whole runs of packed codes.
class Quantizer {
 public:
  /// importance [k]: of kMse's errors; null: all are equal.
  Quantizer(ThreadPool& pool, const TensorView& dense, const QuantizeOptions& options,
            const float* importance, WeightsBuffer& buffer)
      : pool_(pool),
        dense_(dense),
        options_(options),
        importance_(importance),
        buffer_(buffer),
        spec_(buffer.weights.spec),
        encoder_(spec_.format, options.codebook),
        rule_(encoder_, spec_.has_zeros, options.fractional_zeros, options.e8m0_rule),
        groups_(GroupCount(spec_)),
        tiles_(CeilDivide(spec_.n, kTileColumns)) {
    const int64_t unit = std::lcm(spec_.group_size, kPackRun);
    chunk_k_ = spec_.group_size >= spec_.k ? RoundUp(spec_.k, kPackRun)
                                           : std::max(kChunkAim / unit, int64_t{1}) * unit;
    chunk_k_ = std::min(chunk_k_, RoundUp(spec_.k, kPackRun));
  }

  Status Run(QuantizeReport* report);

 private:
  static constexpr int64_t kChunkAim = 1024;

  struct Scratch {
    float* weights;
    uint8_t* codes;
  };
  struct TileResult {
    Status status;
    int64_t zeroed_groups = 0;
    double span = 0;  ///< The largest span of the tile's groups.
  };
  using TileFunction =
      FunctionRef<void(int64_t expert, int64_t tile, const Scratch& scratch, TileResult& result)>;

  Status ForEachTile(TileFunction body, std::vector<TileResult>& results);
  void MeasureTile(int64_t expert, int64_t tile, const Scratch& scratch, TileResult& result);
  void MeasureColumn(int64_t expert, int64_t n, const TileRange& range, const float* w,
                     TileResult& result);
  void QuantizeTile(int64_t expert, int64_t tile, const Scratch& scratch, TileResult& result);
  void QuantizeColumn(int64_t expert, int64_t n, const TileRange& range, const float* w,
                      uint8_t* codes, TileResult& result);
  GroupParameters ParametersOf(const GroupContext& context, const GroupRange& range, int64_t k,
                               const float* w, int64_t count) const;
  Status ChooseGlobalScales();
  GroupContext ContextOf(int64_t expert) const {
    const float global = buffer_.global_scale != nullptr ? buffer_.global_scale[expert] : 1.0f;
    return {encoder_, rule_, ScaleCoder(spec_.scale_type, global), spec_.has_zeros};
  }

  ThreadPool& pool_;
  const TensorView& dense_;
  const QuantizeOptions& options_;
  const float* importance_;
  WeightsBuffer& buffer_;
  const WeightsSpec& spec_;
  Encoder encoder_;
  ScaleRule rule_;
  int64_t groups_;
  int64_t tiles_;
  int64_t chunk_k_ = 0;
};

Status Quantizer::ForEachTile(TileFunction body, std::vector<TileResult>& results) {
  const int64_t tile_bytes = kTileColumns * chunk_k_;
  const int64_t worker_bytes = tile_bytes * 5;
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer scratch,
                          AlignedBuffer::Allocate(worker_bytes * pool_.worker_count()));
  results.assign(static_cast<size_t>(spec_.experts * tiles_), TileResult{});
  pool_.Run(spec_.experts * tiles_, [&](int64_t task, int worker) {
    const int64_t at = worker_bytes * worker;
    const Scratch own{scratch.As<float>(at), scratch.As<uint8_t>(at + 4 * tile_bytes)};
    body(task / tiles_, task % tiles_, own, results[static_cast<size_t>(task)]);
  });
  // The first tile's error, whichever thread found one first.
  for (const TileResult& result : results) MARLIN_RETURN_IF_ERROR(result.status);
  return {};
}

void Quantizer::MeasureColumn(int64_t expert, int64_t n, const TileRange& range, const float* w,
                              TileResult& result) {
  for (int64_t r = 0; r < range.rows; r += spec_.group_size) {
    const int64_t count = std::min(spec_.group_size, range.rows - r);
    const GroupRange extremes = RangeOf(w + r, count, spec_.has_zeros);
    if (!std::isfinite(extremes.amax)) {
      result.status =
          FirstNonFinite(options_.tensor_name, w + r, count, spec_, expert, range.k0 + r, n);
      return;
    }
    result.span = std::max(result.span, rule_.Span(extremes));
  }
}

void Quantizer::MeasureTile(int64_t expert, int64_t tile, const Scratch& scratch,
                            TileResult& result) {
  const MatrixView matrix = MatrixOfExpert(dense_, expert);
  const int64_t n0 = tile * kTileColumns;
  for (int64_t k0 = 0; k0 < spec_.k; k0 += chunk_k_) {
    const TileRange range{k0, std::min(chunk_k_, spec_.k - k0), n0,
                          std::min(kTileColumns, spec_.n - n0)};
    LoadColumns(matrix, range, scratch.weights, chunk_k_);
    for (int64_t c = 0; c < range.columns && result.status.ok(); ++c) {
      MeasureColumn(expert, n0 + c, range, scratch.weights + c * chunk_k_, result);
    }
    if (!result.status.ok()) return;
  }
}

/// The parameters of the group w [count] that begins at k.
GroupParameters Quantizer::ParametersOf(const GroupContext& context, const GroupRange& range,
                                        int64_t k, const float* w, int64_t count) const {
  if (options_.method != QuantizeMethod::kMse) return context.rule.Choose(range, context.coder);
  // Inputs that were never seen say nothing about their weights.
  const bool weighted =
      importance_ != nullptr && std::any_of(importance_ + k, importance_ + k + count,
                                            [](float importance) { return importance > 0.0f; });
  return weighted ? SearchWeighted(context, range, w, importance_ + k, count)
                  : SearchMse(context, range, w, count);
}

void Quantizer::QuantizeColumn(int64_t expert, int64_t n, const TileRange& range, const float* w,
                               uint8_t* codes, TileResult& result) {
  const GroupContext context = ContextOf(expert);
  for (int64_t r = 0; r < range.rows; r += spec_.group_size) {
    const int64_t count = std::min(spec_.group_size, range.rows - r);
    const int64_t k = range.k0 + r;
    const GroupRange extremes = RangeOf(w + r, count, spec_.has_zeros);
    if (!std::isfinite(extremes.amax)) {
      result.status = FirstNonFinite(options_.tensor_name, w + r, count, spec_, expert, k, n);
      return;
    }
    const GroupParameters parameters = ParametersOf(context, extremes, k, w + r, count);
    if (parameters.scale.overflow) {
      result.status = ScaleOverflow(options_.tensor_name, spec_,
                                    rule_.Span(extremes) / rule_.levels(), expert, k, n);
      return;
    }
    StoreParameters(parameters, (expert * groups_ + k / spec_.group_size) * spec_.n + n, &buffer_);
    if (parameters.scale.value == 0.0f) {
      result.zeroed_groups += extremes.amax > 0.0f ? 1 : 0;
      std::memset(codes + r, encoder_.zero_code(), static_cast<size_t>(count));
    } else {
      encoder_.Encode(w + r, count, parameters.scale.value, parameters.zero, codes + r);
    }
  }
  // Positions past k are code 0.
  const int64_t padded = RoundUp(range.rows, kPackRun);
  std::memset(codes + range.rows, 0, static_cast<size_t>(padded - range.rows));
}

void Quantizer::QuantizeTile(int64_t expert, int64_t tile, const Scratch& scratch,
                             TileResult& result) {
  const MatrixView matrix = MatrixOfExpert(dense_, expert);
  const int64_t n0 = tile * kTileColumns;
  const int64_t word_rows = WordsAlongK(spec_.format, spec_.k);
  auto* words = static_cast<uint32_t*>(buffer_.codes) + expert * word_rows * spec_.n + n0;
  for (int64_t k0 = 0; k0 < spec_.k; k0 += chunk_k_) {
    const TileRange range{k0, std::min(chunk_k_, spec_.k - k0), n0,
                          std::min(kTileColumns, spec_.n - n0)};
    LoadColumns(matrix, range, scratch.weights, chunk_k_);
    for (int64_t c = 0; c < range.columns; ++c) {
      QuantizeColumn(expert, n0 + c, range, scratch.weights + c * chunk_k_,
                     scratch.codes + c * chunk_k_, result);
      if (!result.status.ok()) return;
    }
    PackColumns(GetFormatInfo(spec_.format).bits,
                {scratch.codes, chunk_k_, range.rows, range.columns},
                words + WordsAlongK(spec_.format, k0) * spec_.n, spec_.n);
  }
}

Status Quantizer::ChooseGlobalScales() {
  std::vector<TileResult> results;
  MARLIN_RETURN_IF_ERROR(
      ForEachTile([this](int64_t expert, int64_t tile, const Scratch& scratch,
                         TileResult& result) { MeasureTile(expert, tile, scratch, result); },
                  results));
  for (int64_t expert = 0; expert < spec_.experts; ++expert) {
    double span = 0;
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      span = std::max(span, results[static_cast<size_t>(expert * tiles_ + tile)].span);
    }
    buffer_.global_scale[expert] = rule_.GlobalScale(span, options_.method == QuantizeMethod::kMse);
  }
  return {};
}

Status Quantizer::Run(QuantizeReport* report) {
  if (buffer_.global_scale != nullptr) MARLIN_RETURN_IF_ERROR(ChooseGlobalScales());
  std::vector<TileResult> results;
  MARLIN_RETURN_IF_ERROR(
      ForEachTile([this](int64_t expert, int64_t tile, const Scratch& scratch,
                         TileResult& result) { QuantizeTile(expert, tile, scratch, result); },
                  results));
  if (report == nullptr) return {};
  for (const TileResult& result : results) report->zeroed_groups += result.zeroed_groups;
  return {};
}

}  // namespace

void StoreParameters(const GroupParameters& parameters, int64_t index, WeightsBuffer* buffer) {
  const uint32_t bits = parameters.scale.bits;
  switch (DTypeBytes(ScaleDType(buffer->weights.spec.scale_type))) {
    case 1:
      static_cast<uint8_t*>(buffer->scales)[index] = static_cast<uint8_t>(bits);
      break;
    case 2:
      static_cast<uint16_t*>(buffer->scales)[index] = static_cast<uint16_t>(bits);
      break;
    default:
      static_cast<uint32_t*>(buffer->scales)[index] = bits;
      break;
  }
  if (buffer->zeros == nullptr) return;
  const ScaleCoder half(ScaleType::kF16);
  static_cast<uint16_t*>(buffer->zeros)[index] =
      static_cast<uint16_t>(half.Round(parameters.zero).bits);
}

Status RunOnAllThreads(int64_t weight_count, FunctionRef<Status(ThreadPool&)> body) {
  // Starting a thread costs about as much as converting this many weights.
  constexpr int64_t kWeightsPerThread = 1 << 16;
  const int64_t wanted = std::max<int64_t>(weight_count / kWeightsPerThread, 1);
  try {
    ThreadPool pool(static_cast<int>(std::min<int64_t>(wanted, ThreadPool::AvailableProcessors())));
    return body(pool);
  } catch (const ThreadStartError& error) {
    return {Code::kOutOfMemory, std::string("quantize: ") + error.what()};
  } catch (const std::bad_alloc&) {
    return {Code::kOutOfMemory, "quantize: out of memory"};
  }
}

namespace {

/// Stores every weight, whatever options.sparsity. importance [k] may be null.
Result<QuantizedWeights> QuantizeAll(ThreadPool& pool, const TensorView& dense,
                                     const QuantizeOptions& options, const float* importance,
                                     WeightsSpec spec, QuantizeReport* report) {
  spec.sparsity = Sparsity::kDense;
  if (report != nullptr) *report = {};
  if (NeedsCalibration(options.method)) {
    const std::string method(QuantizeMethodName(options.method));
    return Status(
        Code::kUnsupported,
        TensorLabel(options.tensor_name) + ": " + method +
            " needs the inputs of its layer; see QuantizeCalibrated, `quantize --method " + method +
            "` and quantize_model");
  }
  if (!GetFormatInfo(spec.format).quantized) {
    return CopyUnquantized(pool, dense, spec, options.tensor_name);
  }
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  buffer.weights.codebook = options.codebook;
  if (spec.experts == 0 || spec.k == 0 || spec.n == 0) {
    // The number of empty tiles is not bounded by memory: do not loop over them.
    if (buffer.global_scale != nullptr) std::fill_n(buffer.global_scale, spec.experts, 0.0f);
    return std::move(buffer.weights);
  }
  AlignedBuffer rotated;
  TensorView matrix = dense;
  if (spec.input_hadamard > 0) {
    MARLIN_ASSIGN_OR_RETURN(rotated, RotateRows(pool, dense, spec.input_hadamard));
    matrix = TensorView(rotated.As<float>(0), DType::kF32, {spec.k, spec.n});
    importance = nullptr;  // It describes the inputs before the rotation.
  }
  Quantizer quantizer(pool, matrix, options, importance, buffer);
  MARLIN_RETURN_IF_ERROR(quantizer.Run(report));
  return std::move(buffer.weights);
}

}  // namespace

Result<QuantizedWeights> QuantizeWeightedOn(ThreadPool& pool, const TensorView& dense,
                                            const QuantizeOptions& options,
                                            std::span<const float> importance,
                                            QuantizeReport* report) {
  MARLIN_RETURN_IF_ERROR(CheckDense(TensorLabel(options.tensor_name), dense));
  MARLIN_ASSIGN_OR_RETURN(const WeightsSpec spec, QuantizedSpec(dense.shape(), options));
  const float* const weights = importance.empty() ? nullptr : importance.data();
  MARLIN_ASSIGN_OR_RETURN(QuantizedWeights all,
                          QuantizeAll(pool, dense, options, weights, spec, report));
  if (spec.sparsity == Sparsity::kDense) return all;
  Result<QuantizedWeights> pruned = Prune24(all, importance);
  if (!pruned.ok()) return pruned.status().WithContext(TensorLabel(options.tensor_name));
  return pruned;
}

Result<QuantizedWeights> QuantizeOn(ThreadPool& pool, const TensorView& dense,
                                    const QuantizeOptions& options, QuantizeReport* report) {
  return QuantizeWeightedOn(pool, dense, options, {}, report);
}

Result<QuantizedWeights> Quantize(const TensorView& dense, const QuantizeOptions& options,
                                  QuantizeReport* report) {
  QuantizedWeights weights;
  Checked count(1);
  for (int i = 0; i < dense.rank(); ++i) count = count * Checked(dense.dim(i));
  MARLIN_RETURN_IF_ERROR(RunOnAllThreads(count.Take().value_or(0), [&](ThreadPool& pool) -> Status {
    MARLIN_ASSIGN_OR_RETURN(weights, QuantizeOn(pool, dense, options, report));
    return {};
  }));
  return weights;
}

}  // namespace marlin
