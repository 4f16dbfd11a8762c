// Flash attention: softmax with a running maximum (online softmax), one block of keys at a time.
//
//   for every segment of 256 keys, for every block of 32 keys in it, for every KV head:
//     scores = queries . keys; weights = e^(scores - new maximum)
//     out = out * e^(old maximum - new maximum) + weights . values
//   then the segments are merged in order
//
// Blocks and segments are aligned to their size, so a row's result depends neither on the other
// rows nor on the assignment of segments to tasks. Prefill: a task is a run of tokens of one KV
// head with all its segments; keys and values are widened to fp32 once for all its rows. Decode
// (split-KV): a task is a run of segments of several KV heads that are adjacent in memory and read
// in place; the partial results of the segments are kept for the merge.
#include "backends/cpu/attention/cpu_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// Online-softmax state of some rows over some keys: `out` is not yet divided by `sums`.
struct RowStates {
  float* largest;  ///< [rows]
  float* sums;     ///< [rows]
  float* out;      ///< [rows][width]

  static RowStates At(float* memory, const AttentionGeometry& g) {
    const int64_t rows = RoundUp(g.rows(), kFeaturePad);
    return {memory, memory + rows, memory + 2 * rows};
  }
  void Clear(int64_t rows, int64_t width) const {
    std::fill_n(largest, rows, kNothing);
    std::fill_n(sums, rows, 0.0f);
    std::fill_n(out, rows * width, 0.0f);
  }
};

/// A run of tokens of one job.
struct TokenRun {
  const AttentionJob& job;
  const AttentionGeometry& g;
  int64_t first_token;
  int64_t tokens;

  static TokenRun Of(const AttentionJob& job, const AttentionGeometry& g, int64_t run) {
    const int64_t first = run * g.tokens_per_run;
    return {job, g, first, std::min(g.tokens_per_run, g.tokens - first)};
  }
  int64_t rows() const { return tokens * g.group; }
  int64_t first_position() const { return g.length - g.tokens + first_token; }
  int64_t last_position() const { return first_position() + tokens - 1; }
  int64_t PositionOfRow(int64_t row) const { return first_position() + row / g.group; }
  int64_t FirstSegment() const { return g.FirstKey(first_position()) / kSegment; }
  int64_t LastSegment() const { return last_position() / kSegment; }
};

struct HeadRange {
  int64_t begin;
  int64_t end;
};

/// Computes a run of tokens in one worker's scratch memory.
class AttentionWorker {
 public:
  AttentionWorker(const DecoderKernels& kernels, const SegmentKernel* segment_kernel,
                  const AttentionOptions& options, const TokenRun& run, float* memory)
      : kernels_(kernels),
        segment_kernel_(segment_kernel),
        options_(options),
        run_(run),
        g_(run.g) {
    const auto take = [&memory](int64_t floats) {
      float* piece = memory;
      memory += RoundUp(floats, kFeaturePad);
      return piece;
    };
    queries_ = take(g_.QueryFloats());
    keys_ = take(kKeyBlock * g_.padded_depth);
    values_ = take(kKeyBlock * g_.padded_width);
    scores_ = take(g_.rows() * kKeyBlock);
    factors_ = take(g_.rows());
    ranges_ = reinterpret_cast<KeyRange*>(take(g_.rows() * 2));
    total_ = take(g_.StateFloats());
    part_ = take(g_.StateFloats());
    packed_ = take(g_.PackedFloats(segment_kernel));
    widened_ = reinterpret_cast<uint16_t*>(take(g_.WidenedFloats()));
    segment_ = memory;
    scale_ = options.scale != 0.0f ? options.scale : 1.0f / std::sqrt(static_cast<float>(g_.depth));
  }

  /// Processes all segments of one KV head in order.
  void RunHead(int64_t head) {
    LoadQueries({head, head + 1});
    const RowStates total = RowStates::At(total_, g_);
    const RowStates part = RowStates::At(part_, g_);
    total.Clear(run_.rows(), g_.padded_width);
    for (int64_t segment = run_.FirstSegment(); segment <= run_.LastSegment(); ++segment) {
      part.Clear(run_.rows(), g_.padded_width);
      RunSegment({head, head + 1}, segment, [&part](int64_t) { return part; });
      Merge(part, total);
    }
    Finish(head, total);
  }

  /// Split-KV: processes segments [begin, end) of some KV heads. States go to
  /// `partials` [head][segment].
  void RunSegments(HeadRange heads, int64_t begin, int64_t end, float* partials) {
    LoadQueries(heads);
    for (int64_t segment = begin; segment < end; ++segment) {
      const auto state = [&](int64_t head) {
        const int64_t index = head * g_.segments + segment - g_.first_segment;
        return RowStates::At(partials + index * g_.StateFloats(), g_);
      };
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        state(head).Clear(run_.rows(), g_.padded_width);
      }
      RunSegment(heads, segment, state);
    }
  }

  /// Merges the partial states that RunSegments wrote for a head.
  void MergeSegments(int64_t head, float* partials) {
    const RowStates total = RowStates::At(total_, g_);
    total.Clear(run_.rows(), g_.padded_width);
    for (int64_t segment = 0; segment < g_.segments; ++segment) {
      const int64_t index = head * g_.segments + segment;
      Merge(RowStates::At(partials + index * g_.StateFloats(), g_), total);
    }
    Finish(head, total);
  }

 private:
  /// The range of keys in a segment that any row sees, its begin rounded down to a block.
  int64_t BeginOf(int64_t segment) const {
    const int64_t first = std::max(segment * kSegment, g_.FirstKey(run_.first_position()));
    return first / kKeyBlock * kKeyBlock;
  }
  int64_t EndOf(int64_t segment) const {
    return std::min((segment + 1) * kSegment, run_.last_position() + 1);
  }

  void LoadQueries(HeadRange heads) {
    const TensorView& q = run_.job.queries;
    float* to = queries_;
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      for (int64_t row = 0; row < run_.rows(); ++row, to += g_.padded_depth) {
        const int64_t token = run_.first_token + row / g_.group;
        const int64_t query_head = head * g_.group + row % g_.group;
        const int64_t at = token * q.stride(0) + query_head * q.stride(1);
        LoadRow(q.As<uint8_t>() + at * DTypeBytes(q.dtype()), q.dtype(), g_.depth, to);
      }
    }
    for (int64_t i = 0; g_.tiles && i < heads.end - heads.begin; ++i) {
      segment_kernel_->pack(QueriesOf(i), run_.rows(), g_.depth, PackedOf(i));
    }
  }

  /// Widens a row to fp32 and zero-pads its features.
  void LoadRow(const uint8_t* from, DType type, int64_t features, float* to) const {
    kernels_.widen(from, type, features, to);
    std::fill(to + features, to + RoundUp(features, kFeaturePad), 0.0f);
  }

  /// Rows of a block: in place if few queries read them, else widened to fp32.
  KeyRows LoadBlock(const KeyMemory& memory, int64_t head, int64_t key, int64_t count,
                    float* widened) const {
    const uint8_t* from = memory.At(head, key);
    if (g_.ReadsInPlace(memory)) return {from, memory.position_stride, memory.type, count};
    const int64_t padded = RoundUp(memory.features, kFeaturePad);
    if (memory.position_stride == padded && memory.features == padded) {
      // Rows without gaps, as in a cache, are one run.
      kernels_.widen(from, memory.type, count * padded, widened);
      return {widened, padded, DType::kF32, count};
    }
    for (int64_t row = 0; row < count; ++row) {
      const int64_t at = row * memory.position_stride * DTypeBytes(memory.type);
      LoadRow(from + at, memory.type, memory.features, widened + row * padded);
    }
    return {widened, padded, DType::kF32, count};
  }

  /// Up to `count` rows of one head from `key` on, as a prefetch target.
  Upcoming Rows(const KeyMemory& memory, int64_t head, int64_t key, int64_t count) const {
    const int64_t rows = std::min(count, run_.last_position() + 1 - key);
    if (rows <= 0) return {};
    const int64_t element = DTypeBytes(memory.type);
    return {memory.At(head, key), memory.position_stride * element, memory.features * element,
            rows};
  }

  /// Processes one segment of some heads, whose states are state_of(head).
  template <typename StateOf>
  void RunSegment(HeadRange heads, int64_t segment, const StateOf& state_of) {
    const int64_t begin = BeginOf(segment);
    const int64_t end = EndOf(segment);
    const int64_t step = g_.tiles ? kSegment : kKeyBlock;
    for (int64_t key = begin; key < end; key += step) {
      const int64_t count = std::min(step, end - key);
      FindRanges(key, count);
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        const AttentionRows rows = RowsOf(head - heads.begin, state_of(head));
        // Prefetch the keys of the next head; at the last head, the next keys of the first.
        const bool last = head + 1 == heads.end;
        const int64_t next_head = last ? heads.begin : head + 1;
        const int64_t next_key = last ? key + count : key;
        const Upcoming next_keys = Rows(run_.job.keys, next_head, next_key, step);
        if (g_.tiles) {
          RunTiles(rows, head, key, count, next_keys);
        } else {
          RunBlock(rows, head, key, count, next_keys);
        }
      }
    }
  }

  void FindRanges(int64_t key, int64_t count) {
    for (int64_t row = 0; row < run_.rows(); ++row) {
      const int64_t position = run_.PositionOfRow(row);
      const int64_t begin = std::clamp<int64_t>(g_.FirstKey(position) - key, 0, count);
      const int64_t end = std::clamp<int64_t>(position + 1 - key, begin, count);
      ranges_[row] = {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
    }
  }

  float* QueriesOf(int64_t index) const { return queries_ + index * run_.rows() * g_.padded_depth; }
  float* PackedOf(int64_t index) const {
    return packed_ + index * segment_kernel_->packed_floats(g_.rows(), g_.depth);
  }

  /// The queries at `index` of LoadQueries, and their softmax state.
  AttentionRows RowsOf(int64_t index, const RowStates& state) const {
    AttentionRows rows;
    rows.count = run_.rows();
    rows.depth = g_.padded_depth;
    rows.width = g_.padded_width;
    rows.queries = QueriesOf(index);
    rows.packed = g_.tiles ? PackedOf(index) : nullptr;
    rows.ranges = ranges_;
    rows.scores = scores_;
    rows.factors = factors_;
    rows.largest = state.largest;
    rows.sums = state.sums;
    rows.out = state.out;
    return rows;
  }

  void RunBlock(const AttentionRows& rows, int64_t head, int64_t key, int64_t count,
                const Upcoming& next_keys) const {
    const AttentionJob& job = run_.job;
    kernels_.score(rows, LoadBlock(job.keys, head, key, count, keys_), scale_,
                   Rows(job.values, head, key, count));
    if (options_.softcap != 0.0f) CapScores(rows);
    kernels_.weigh(rows);
    kernels_.mix(rows, LoadBlock(job.values, head, key, count, values_), next_keys);
  }

  void CapScores(const AttentionRows& rows) const {
    for (int64_t row = 0; row < rows.count; ++row) {
      const KeyRange& range = rows.ranges[row];
      kernels_.cap(options_.softcap, range.end - range.begin,
                   rows.scores + row * kKeyBlock + range.begin);
    }
  }

  void RunTiles(const AttentionRows& rows, int64_t head, int64_t key, int64_t count,
                const Upcoming& next_keys) const {
    const auto as_bf16 = [&](const KeyMemory& memory, uint16_t* widened) -> KeyRows {
      const uint8_t* const from = memory.At(head, key);
      if (memory.type == DType::kBf16) return {from, memory.position_stride, memory.type, count};
      for (int64_t row = 0; row < count; ++row) {
        segment_kernel_->widen(from + row * memory.position_stride, memory.features,
                               widened + row * memory.features);
      }
      return {widened, memory.features, DType::kBf16, count};
    };
    segment_kernel_->run(rows, as_bf16(run_.job.keys, widened_),
                         as_bf16(run_.job.values, widened_ + kSegment * g_.depth), scale_,
                         next_keys, segment_);
  }

  /// The factor that rescales sums from maximum `before` to maximum `after`.
  static float FactorOf(float before, float after) {
    return before == after ? 1.0f : std::exp(before - after);
  }

  void Merge(const RowStates& part, const RowStates& total) const {
    const int64_t width = g_.padded_width;
    for (int64_t row = 0; row < run_.rows(); ++row) {
      // The row saw no key of the segment. A NaN score gives a NaN sum and must not be skipped.
      if (part.largest[row] == kNothing && part.sums[row] == 0.0f) continue;
      const float largest = std::max(total.largest[row], part.largest[row]);
      const float old_factor = FactorOf(total.largest[row], largest);
      const float new_factor = FactorOf(part.largest[row], largest);
      total.sums[row] = total.sums[row] * old_factor + part.sums[row] * new_factor;
      kernels_.blend(part.out + row * width, new_factor, width, old_factor,
                     total.out + row * width);
      total.largest[row] = largest;
    }
  }

  void Finish(int64_t head, const RowStates& total) const {
    const MutableTensorView& out = run_.job.out;
    const auto* sinks = options_.sinks.As<float>();
    for (int64_t row = 0; row < run_.rows(); ++row) {
      const int64_t token = run_.first_token + row / g_.group;
      const int64_t query_head = head * g_.group + row % g_.group;
      float sum = total.sums[row];
      float factor = 1.0f;
      if (sinks != nullptr) {
        const float largest = std::max(total.largest[row], sinks[query_head]);
        factor = FactorOf(total.largest[row], largest);
        sum = sum * factor + FactorOf(sinks[query_head], largest);
      }
      float* values = total.out + row * g_.padded_width;
      for (int64_t i = 0; i < g_.width; ++i) values[i] = values[i] * factor / sum;
      const int64_t at = token * out.stride(0) + query_head * out.stride(1);
      kernels_.narrow(values, g_.width, out.dtype(),
                      static_cast<uint8_t*>(out.data()) + at * DTypeBytes(out.dtype()));
    }
  }

  const DecoderKernels& kernels_;
  const SegmentKernel* segment_kernel_;
  const AttentionOptions& options_;
  const TokenRun& run_;
  const AttentionGeometry& g_;
  float scale_;
  float* queries_;
  float* keys_;
  float* values_;
  float* scores_;
  float* factors_;
  KeyRange* ranges_;
  float* total_;
  float* part_;
  float* packed_;      ///< Queries packed for the segment kernel, head by head.
  uint16_t* widened_;  ///< The keys and values of a segment as bf16.
  float* segment_;     ///< Scratch of the segment kernel.
};

}  // namespace

AttentionContext CpuDecoder::ContextOf(int64_t jobs, const AttentionOptions& options) const {
  const bool exact =
      options.accuracy == Accuracy::kExact || options.determinism == Determinism::kBatchInvariant;
  // The segment kernel does not cap scores.
  const bool vectors = exact || options.softcap != 0.0F;
  return {jobs, options.window, options.chunked, pool_.worker_count(),
          vectors ? nullptr : segment_kernel_};
}

void CpuDecoder::RunJobs(std::span<const AttentionJob> jobs, const AttentionOptions& options,
                         float* scratch) const {
  const AttentionSchedule schedule(jobs, ContextOf(static_cast<int64_t>(jobs.size()), options));
  const int64_t scratch_floats = schedule.totals().scratch_floats;
  float* partials = scratch + pool_.worker_count() * scratch_floats;
  pool_.Run(schedule.totals().tasks, [&](int64_t number, int id) {
    const AttentionSchedule::Place place = schedule.FindTask(number);
    const AttentionGeometry& g = place.g;
    float* memory = scratch + id * scratch_floats;
    if (!g.apart) {
      // Later tokens see more keys: start the longest tasks first.
      const TokenRun run = TokenRun::Of(*place.job, g, g.runs - 1 - place.index % g.runs);
      return AttentionWorker(kernels_, segment_kernel_, options, run, memory)
          .RunHead(place.index / g.runs);
    }
    const int64_t part = place.index / g.head_parts % g.segment_parts;
    const int64_t head = place.index % g.head_parts * g.heads_per_part;
    const int64_t run_index = place.index / (g.head_parts * g.segment_parts);
    const TokenRun run = TokenRun::Of(*place.job, g, run_index);
    const int64_t begin = g.first_segment + part * g.segments_per_part;
    AttentionWorker(kernels_, segment_kernel_, options, run, memory)
        .RunSegments({head, std::min(head + g.heads_per_part, g.kv_heads)}, begin,
                     std::min(begin + g.segments_per_part, g.first_segment + g.segments),
                     partials + place.partials + run_index * g.RunFloats());
  });
  pool_.Run(schedule.totals().merges, [&](int64_t number, int id) {
    const AttentionSchedule::Place place = schedule.FindMerge(number);
    const int64_t run_index = place.index / place.g.kv_heads;
    const TokenRun run = TokenRun::Of(*place.job, place.g, run_index);
    AttentionWorker(kernels_, segment_kernel_, options, run, scratch + id * scratch_floats)
        .MergeSegments(place.index % place.g.kv_heads,
                       partials + place.partials + run_index * place.g.RunFloats());
  });
}

}  // namespace marlin::cpu
