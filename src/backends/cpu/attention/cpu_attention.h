// The split of attention into tasks, and the layout of their workspace.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cpu/decoder/decoder_kernels.h"
#include "marlin/decoder.h"

namespace marlin::cpu {

/// The keys or the values of one sequence: strided, or paged. Strides count elements.
struct KeyMemory {
  const uint8_t* data;             ///< Head 0, position 0. Unused if there are segments.
  const uint8_t* const* segments;  ///< Head 0 at each multiple of kSegment, or null.
  DType type;
  int64_t features;
  int64_t position_stride;
  int64_t head_stride;

  /// Address of one key. The keys up to the next multiple of kSegment follow at position_stride.
  const uint8_t* At(int64_t head, int64_t position) const {
    const uint8_t* const from = segments != nullptr ? segments[position / kSegment] : data;
    const int64_t place = segments != nullptr ? position % kSegment : position;
    return from + (head * head_stride + place * position_stride) * DTypeBytes(type);
  }
};

/// One sequence of a call, with contiguous or paged keys.
struct AttentionJob {
  TensorView queries;  ///< [tokens, heads, depth]: the last `tokens` positions of `length`.
  KeyMemory keys;
  KeyMemory values;
  int64_t length;
  int64_t kv_heads;
  MutableTensorView out;

  static AttentionJob Of(const AttentionInput& input);
};

/// Parameters shared by all jobs of a call.
struct AttentionContext {
  int64_t jobs;
  int64_t window;
  bool chunked;  ///< AttentionOptions::chunked.
  int64_t workers;
  const SegmentKernel* segment_kernel;  ///< Or null.
};

/// Sizes and tiling of one job.
struct AttentionGeometry {
  int64_t tokens;
  int64_t length;
  int64_t kv_heads;
  int64_t group;  ///< Query heads per KV head.
  int64_t depth;
  int64_t width;
  int64_t padded_depth;
  int64_t padded_width;
  int64_t window;
  bool chunked;
  bool tiles;  ///< Whether the segment kernel (AMX tiles) is used.
  int64_t tokens_per_run;
  int64_t runs;
  int64_t first_segment;
  int64_t segments;
  bool apart;  ///< Split-KV: runs of segments are separate tasks. The fields below are for that.
  int64_t segments_per_part;
  int64_t segment_parts;
  int64_t heads_per_part;
  int64_t head_parts;

  static AttentionGeometry Of(const AttentionJob& job, const AttentionContext& context);

  /// Maximum rows per run.
  int64_t rows() const { return tokens_per_run * group; }
  int64_t tasks() const { return apart ? runs * segment_parts * head_parts : runs * kv_heads; }
  int64_t merges() const { return apart ? runs * kv_heads : 0; }
  int64_t FirstKey(int64_t position) const;
  /// Whether the kernels read these keys or values in place.
  bool ReadsInPlace(const KeyMemory& memory) const;

  /// Floats of the softmax state of a run's rows for one KV head and segment.
  int64_t StateFloats() const;
  /// Floats of all partial states of a run with split-KV.
  int64_t RunFloats() const { return kv_heads * segments * StateFloats(); }
  int64_t QueryFloats() const { return (apart ? heads_per_part : 1) * rows() * padded_depth; }
  /// Floats of a segment's keys and values as bf16, for the segment kernel.
  int64_t WidenedFloats() const { return tiles ? kSegment * (depth + width) / 2 : 0; }
  /// Floats of the queries packed for the segment kernel.
  int64_t PackedFloats(const SegmentKernel* kernel) const;
  int64_t ScratchFloats(const SegmentKernel* kernel) const;

 private:
  void CutApart(const AttentionContext& context, bool side_by_side);
};

/// Task counts and workspace of a list of jobs.
struct AttentionTotals {
  int64_t tasks = 0;
  int64_t merges = 0;
  int64_t scratch_floats = 0;  ///< Per worker.
  int64_t partial_floats = 0;

  void Add(const AttentionJob& job, const AttentionContext& context);
  int64_t Floats(int64_t workers) const { return workers * scratch_floats + partial_floats; }
};

/// The tasks of all jobs as one list.
class AttentionSchedule {
 public:
  AttentionSchedule(std::span<const AttentionJob> jobs, const AttentionContext& context);
  const AttentionTotals& totals() const { return totals_; }

  struct Place {
    const AttentionJob* job;
    AttentionGeometry g;
    int64_t index;     ///< Index of the task in its job.
    int64_t partials;  ///< Offset of the job's partial states, in floats.
  };
  Place FindTask(int64_t task) const { return Find(task, false); }
  Place FindMerge(int64_t merge) const { return Find(merge, true); }

 private:
  Place Find(int64_t index, bool merging) const;

  std::span<const AttentionJob> jobs_;
  AttentionContext context_;
  AttentionTotals totals_;
};

}  // namespace marlin::cpu
