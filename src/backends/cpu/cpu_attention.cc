// Softmax attention with a running maximum, one block of keys at a time.
//
//   for every (input, key head, run of tokens): rows = its tokens x the heads that share the key
//   head; for every segment of 1024 keys: for every block of 64 keys:
//     scores = queries . keys; weights = e^(scores - largest so far); out = out * e^(...) + weights
//     . values
//   segments are then merged in order
//
// Blocks and segments begin at multiples of their size, so a row's result depends neither on the
// other rows nor on who computed which segment. With few tokens the segments are tasks of their
// own, because a long cache is then all the work there is.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/cpu_decoder.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

constexpr int64_t kSegment = 1024;
/// Rows of a task: enough to use a block of keys often, few enough to stay in L1 and L2.
constexpr int64_t kRowsPerTask = 32;
/// Up to so many tokens an input's segments are computed apart.
constexpr int64_t kSplitTokens = 4;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

static_assert(kSegment % kKeyBlock == 0);

/// The softmax of some rows over some keys, not yet divided by `sum`.
struct RowStates {
  float* largest;  ///< [rows]
  float* sum;      ///< [rows]
  float* out;      ///< [rows][width]

  static int64_t Floats(int64_t rows, int64_t width) { return rows * (2 + width); }
  static RowStates At(float* memory, int64_t rows) {
    return {memory, memory + rows, memory + 2 * rows};
  }
  void Clear(int64_t rows, int64_t width) const {
    std::fill_n(largest, rows, kNothing);
    std::fill_n(sum, rows * (1 + width), 0.0f);
  }
};

struct Geometry {
  int64_t heads;
  int64_t kv_heads;
  int64_t depth;
  int64_t width;
  int64_t tokens;
  int64_t length;
  int64_t group;  ///< Query heads of a key head.
  int64_t tokens_per_task;
  int64_t runs;      ///< Of tokens_per_task tokens.
  int64_t segments;  ///< Computed apart; 1 when they are not.

  static Geometry Of(const AttentionInput& input) {
    Geometry g{};
    g.tokens = input.queries.dim(0);
    g.heads = input.queries.dim(1);
    g.depth = input.queries.dim(2);
    g.length = input.keys.dim(0);
    g.kv_heads = input.keys.dim(1);
    g.width = input.values.dim(2);
    g.group = g.kv_heads > 0 ? g.heads / g.kv_heads : 0;
    g.tokens_per_task = std::max<int64_t>(kRowsPerTask / std::max<int64_t>(g.group, 1), 1);
    g.runs = CeilDivide(g.tokens, g.tokens_per_task);
    g.segments = g.tokens <= kSplitTokens ? CeilDivide(g.length, kSegment) : 1;
    return g;
  }
  int64_t rows() const { return tokens_per_task * group; }
  int64_t tasks() const { return kv_heads * runs * segments; }
  /// Floats of the partial results of segments that are computed apart.
  int64_t PartialFloats() const {
    return segments > 1 ? tasks() * RowStates::Floats(rows(), width) : 0;
  }
  int64_t ScratchFloats() const {
    return rows() * depth + kKeyBlock * (depth + width) + rows() * (kKeyBlock + 1) +
           2 * RowStates::Floats(rows(), width);
  }
};

/// One task: some tokens of one input and one key head.
struct Task {
  const AttentionInput& input;
  const Geometry& g;
  int64_t kv_head;
  int64_t first_token;
  int64_t tokens;

  int64_t rows() const { return tokens * g.group; }
  int64_t PositionOfRow(int64_t row) const {
    return g.length - g.tokens + first_token + row / g.group;
  }
};

/// One (input, key head) computed with one worker's memory.
class Worker {
 public:
  Worker(const DecoderKernels& kernels, const AttentionOptions& options, const Geometry& g,
         float* memory)
      : kernels_(kernels), options_(options) {
    queries_ = memory;
    keys_ = queries_ + g.rows() * g.depth;
    values_ = keys_ + kKeyBlock * g.depth;
    scores_ = values_ + kKeyBlock * g.width;
    factors_ = scores_ + g.rows() * kKeyBlock;
    total_ = factors_ + g.rows();
    segment_ = total_ + RowStates::Floats(g.rows(), g.width);
    scale_ = options.scale != 0.0f ? options.scale : 1.0f / std::sqrt(static_cast<float>(g.depth));
  }

  void LoadQueries(const Task& task) {
    const TensorView& q = task.input.queries;
    for (int64_t row = 0; row < task.rows(); ++row) {
      const int64_t token = task.first_token + row / task.g.group;
      const int64_t head = task.kv_head * task.g.group + row % task.g.group;
      const int64_t at = token * q.stride(0) + head * q.stride(1);
      kernels_.widen(q.As<uint8_t>() + at * DTypeBytes(q.dtype()), q.dtype(), task.g.depth,
                     queries_ + row * task.g.depth);
    }
  }

  /// The softmax of the task's rows over one segment of keys.
  void RunSegment(const Task& task, int64_t segment, const RowStates& state) {
    state.Clear(task.rows(), task.g.width);
    const int64_t begin = std::max(segment * kSegment, FirstKey(task.PositionOfRow(0)));
    const int64_t end = std::min((segment + 1) * kSegment, task.PositionOfRow(task.rows() - 1) + 1);
    for (int64_t key = begin / kKeyBlock * kKeyBlock; key < end; key += kKeyBlock) {
      RunBlock(task, key, std::min(kKeyBlock, end - key), state);
    }
  }

  /// All segments, one after the other.
  void RunAll(const Task& task) {
    LoadQueries(task);
    const RowStates total = RowStates::At(total_, task.rows());
    const RowStates part = RowStates::At(segment_, task.rows());
    total.Clear(task.rows(), task.g.width);
    const int64_t first = FirstKey(task.PositionOfRow(0)) / kSegment;
    const int64_t last = task.PositionOfRow(task.rows() - 1) / kSegment;
    for (int64_t segment = first; segment <= last; ++segment) {
      RunSegment(task, segment, part);
      Merge(part, task.rows(), task.g.width, total);
    }
    Finish(task, total);
  }

  /// Merges what the tasks of a run of segments left, in order.
  void MergeAll(const Task& task, const float* partials, int64_t partial_stride) {
    const RowStates total = RowStates::At(total_, task.rows());
    total.Clear(task.rows(), task.g.width);
    for (int64_t segment = 0; segment < task.g.segments; ++segment) {
      auto* memory = const_cast<float*>(partials + segment * partial_stride);
      Merge(RowStates::At(memory, task.rows()), task.rows(), task.g.width, total);
    }
    Finish(task, total);
  }

 private:
  int64_t FirstKey(int64_t position) const {
    return options_.window > 0 ? std::max<int64_t>(position - options_.window + 1, 0) : 0;
  }

  /// Rows of a block as fp32: in place, or widened.
  FloatRows LoadBlock(const TensorView& view, int64_t kv_head, int64_t first, int64_t count,
                      float* memory) const {
    const int64_t width = view.dim(2);
    const int64_t at = first * view.stride(0) + kv_head * view.stride(1);
    if (view.dtype() == DType::kF32) return {view.As<float>() + at, view.stride(0), count};
    for (int64_t row = 0; row < count; ++row) {
      kernels_.widen(view.As<uint16_t>() + at + row * view.stride(0), view.dtype(), width,
                     memory + row * width);
    }
    return {memory, width, count};
  }

  void RunBlock(const Task& task, int64_t key, int64_t count, const RowStates& state) {
    const int64_t rows = task.rows();
    const FloatRows keys = LoadBlock(task.input.keys, task.kv_head, key, count, keys_);
    kernels_.score({queries_, task.g.depth, rows}, keys, task.g.depth, scale_, scores_);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = task.PositionOfRow(row);
      const int64_t low = std::clamp<int64_t>(FirstKey(position) - key, 0, count);
      const int64_t high = std::clamp<int64_t>(position + 1 - key, 0, count);
      factors_[row] =
          WeighRow(scores_ + row * kKeyBlock, count, low, std::max(low, high), row, state);
    }
    const FloatRows values = LoadBlock(task.input.values, task.kv_head, key, count, values_);
    kernels_.mix(scores_, factors_, values, task.g.width, rows, state.out);
  }

  /// Turns a row's scores of keys [low, high) into weights, the others into 0; returns the factor
  /// that the row's earlier sums take.
  float WeighRow(float* scores, int64_t count, int64_t low, int64_t high, int64_t row,
                 const RowStates& state) const {
    std::fill(scores, scores + low, 0.0f);
    std::fill(scores + high, scores + count, 0.0f);
    if (low == high) return 1.0f;
    float largest = state.largest[row];
    for (int64_t i = low; i < high; ++i) largest = scores[i] > largest ? scores[i] : largest;
    const float factor = FactorOf(state.largest[row], largest);
    const float sum = kernels_.exponentials(scores + low, high - low, largest);
    state.sum[row] = state.sum[row] * factor + sum;
    state.largest[row] = largest;
    return factor;
  }

  /// What sums relative to `before` are worth relative to `after`.
  static float FactorOf(float before, float after) {
    return before == kNothing ? 0.0f : std::exp(before - after);
  }

  static void Merge(const RowStates& part, int64_t rows, int64_t width, const RowStates& total) {
    for (int64_t row = 0; row < rows; ++row) {
      // No key of the segment was seen: its sum is 0, or NaN when a score was.
      if (part.largest[row] == kNothing && part.sum[row] == 0.0f) continue;
      const float largest = std::max(total.largest[row], part.largest[row]);
      const float old_factor = FactorOf(total.largest[row], largest);
      const float new_factor =
          part.largest[row] == kNothing ? 1.0f : FactorOf(part.largest[row], largest);
      total.sum[row] = total.sum[row] * old_factor + part.sum[row] * new_factor;
      float* to = total.out + row * width;
      const float* from = part.out + row * width;
      for (int64_t i = 0; i < width; ++i) to[i] = to[i] * old_factor + from[i] * new_factor;
      total.largest[row] = largest;
    }
  }

  void Finish(const Task& task, const RowStates& total) const {
    const MutableTensorView& out = task.input.out;
    const auto* sinks = options_.sinks.As<float>();
    for (int64_t row = 0; row < task.rows(); ++row) {
      const int64_t token = task.first_token + row / task.g.group;
      const int64_t head = task.kv_head * task.g.group + row % task.g.group;
      float sum = total.sum[row];
      float factor = 1.0f;
      if (sinks != nullptr) {
        const float largest = std::max(total.largest[row], sinks[head]);
        factor = FactorOf(total.largest[row], largest);
        sum = sum * factor + std::exp(sinks[head] - largest);
      }
      float* values = total.out + row * task.g.width;
      for (int64_t i = 0; i < task.g.width; ++i) values[i] = values[i] * factor / sum;
      const int64_t at = token * out.stride(0) + head * out.stride(1);
      kernels_.narrow(values, task.g.width, out.dtype(),
                      static_cast<uint8_t*>(out.data()) + at * DTypeBytes(out.dtype()));
    }
  }

  const DecoderKernels& kernels_;
  const AttentionOptions& options_;
  float scale_;
  float* queries_;
  float* keys_;
  float* values_;
  float* scores_;
  float* factors_;
  float* total_;
  float* segment_;
};

/// All inputs' tasks as one list, and where their partial results lie.
class Schedule {
 public:
  explicit Schedule(std::span<const AttentionInput> inputs) : inputs_(inputs) {
    for (const AttentionInput& input : inputs) {
      const Geometry g = Geometry::Of(input);
      scratch_floats_ = std::max(scratch_floats_, RoundUp(g.ScratchFloats(), 16));
      partial_floats_ += g.PartialFloats();
      tasks_ += g.tasks();
      merges_ += g.segments > 1 ? g.kv_heads * g.runs : 0;
    }
  }
  int64_t tasks() const { return tasks_; }
  int64_t merges() const { return merges_; }
  int64_t scratch_floats() const { return scratch_floats_; }
  int64_t TotalFloats(int workers) const { return workers * scratch_floats_ + partial_floats_; }

  /// Calls body(input, geometry, task in the input, floats of partial results before it).
  template <typename Body>
  void Find(int64_t task, bool merging, Body body) const {
    int64_t partials = 0;
    for (const AttentionInput& input : inputs_) {
      const Geometry g = Geometry::Of(input);
      const int64_t count = !merging ? g.tasks() : (g.segments > 1 ? g.kv_heads * g.runs : 0);
      if (task < count) return body(input, g, task, partials);
      task -= count;
      partials += g.PartialFloats();
    }
  }

 private:
  std::span<const AttentionInput> inputs_;
  int64_t tasks_ = 0;
  int64_t merges_ = 0;
  int64_t scratch_floats_ = 0;
  int64_t partial_floats_ = 0;
};

Task MakeTask(const AttentionInput& input, const Geometry& g, int64_t index) {
  const int64_t first = index % g.runs * g.tokens_per_task;
  return {input, g, index / g.runs, first, std::min(g.tokens_per_task, g.tokens - first)};
}

}  // namespace

int64_t CpuDecoder::AttentionWorkspaceBytes(std::span<const AttentionInput> inputs) const {
  return Schedule(inputs).TotalFloats(pool_.worker_count()) * int64_t{sizeof(float)};
}

void CpuDecoder::Attention(std::span<const AttentionInput> inputs, const AttentionOptions& options,
                           void* workspace) const {
  const Schedule schedule(inputs);
  auto* scratch = static_cast<float*>(workspace);
  float* partials = scratch + pool_.worker_count() * schedule.scratch_floats();
  pool_.Run(schedule.tasks(), [&](int64_t number, int id) {
    schedule.Find(
        number, false,
        [&](const AttentionInput& input, const Geometry& g, int64_t index, int64_t before) {
          Worker worker(kernels_, options, g, scratch + id * schedule.scratch_floats());
          const Task task = MakeTask(input, g, index / g.segments);
          if (g.segments == 1) return worker.RunAll(task);
          worker.LoadQueries(task);
          float* memory = partials + before + index * RowStates::Floats(g.rows(), g.width);
          worker.RunSegment(task, index % g.segments, RowStates::At(memory, task.rows()));
        });
  });
  if (schedule.merges() == 0) return;
  pool_.Run(schedule.merges(), [&](int64_t number, int id) {
    schedule.Find(
        number, true,
        [&](const AttentionInput& input, const Geometry& g, int64_t index, int64_t before) {
          Worker worker(kernels_, options, g, scratch + id * schedule.scratch_floats());
          const int64_t stride = RowStates::Floats(g.rows(), g.width);
          worker.MergeAll(MakeTask(input, g, index),
                          partials + before + index * g.segments * stride, stride);
        });
  });
}

}  // namespace marlin::cpu
