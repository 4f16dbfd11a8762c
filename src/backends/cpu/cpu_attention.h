// How attention is cut into tasks, and where their memory lies.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cpu/decoder_kernels.h"
#include "marlin/decoder.h"

namespace marlin::cpu {

/// The keys or the values of one sequence: anywhere with equal strides, or in pages. Strides count
/// elements.
struct KeyMemory {
  const uint8_t* data;             ///< Of head 0 and position 0, where there are no segments.
  const uint8_t* const* segments;  ///< Of head 0 at each multiple of kSegment, or null.
  DType type;
  int64_t features;
  int64_t position_stride;
  int64_t head_stride;

  /// One key. The keys up to the next multiple of kSegment lie position_stride apart from it.
  const uint8_t* At(int64_t head, int64_t position) const {
    const uint8_t* const from = segments != nullptr ? segments[position / kSegment] : data;
    const int64_t place = segments != nullptr ? position % kSegment : position;
    return from + (head * head_stride + place * position_stride) * DTypeBytes(type);
  }
};

/// One sequence's part of a call, whether its keys lie in pages or not.
struct AttentionJob {
  TensorView queries;  ///< [tokens, heads, depth]: the last `tokens` positions of `length`.
  KeyMemory keys;
  KeyMemory values;
  int64_t length;
  int64_t kv_heads;
  MutableTensorView out;

  static AttentionJob Of(const AttentionInput& input);
};

/// The numbers that all jobs of a call share.
struct AttentionContext {
  int64_t jobs;
  int64_t window;
  int64_t workers;
  const SegmentKernel* segment_kernel;  ///< Or null.
};

/// The numbers of one job.
struct AttentionGeometry {
  int64_t tokens;
  int64_t length;
  int64_t kv_heads;
  int64_t group;  ///< Query heads of a key head.
  int64_t depth;
  int64_t width;
  int64_t padded_depth;
  int64_t padded_width;
  int64_t window;
  bool tiles;  ///< Whether the segment kernel computes it.
  int64_t tokens_per_run;
  int64_t runs;
  int64_t first_segment;
  int64_t segments;
  bool apart;  ///< Whether runs of segments are tasks of their own; the rest is for that.
  int64_t segments_per_part;
  int64_t segment_parts;
  int64_t heads_per_part;
  int64_t head_parts;

  static AttentionGeometry Of(const AttentionJob& job, const AttentionContext& context);

  /// Rows of a run, at most.
  int64_t rows() const { return tokens_per_run * group; }
  int64_t tasks() const { return apart ? runs * segment_parts * head_parts : runs * kv_heads; }
  int64_t merges() const { return apart ? runs * kv_heads : 0; }
  int64_t FirstKey(int64_t position) const;
  /// Whether the kernels read these keys or values where they are.
  bool ReadsInPlace(const KeyMemory& memory) const;

  /// Floats of the softmax states of a run's rows, of one key head and segment.
  int64_t StateFloats() const;
  /// Floats of all states of a run, when computed apart.
  int64_t RunFloats() const { return kv_heads * segments * StateFloats(); }
  int64_t QueryFloats() const { return (apart ? heads_per_part : 1) * rows() * padded_depth; }
  /// Floats of QueryFloats as the segment kernel packs them.
  int64_t PackedFloats(const SegmentKernel* kernel) const;
  int64_t ScratchFloats(const SegmentKernel* kernel) const;

 private:
  void CutApart(const AttentionContext& context, bool side_by_side);
};

/// The memory and the tasks of some jobs.
struct AttentionTotals {
  int64_t tasks = 0;
  int64_t merges = 0;
  int64_t scratch_floats = 0;  ///< Of one worker.
  int64_t partial_floats = 0;

  void Add(const AttentionJob& job, const AttentionContext& context);
  int64_t Floats(int64_t workers) const { return workers * scratch_floats + partial_floats; }
};

/// All jobs' tasks as one list.
class AttentionSchedule {
 public:
  AttentionSchedule(std::span<const AttentionJob> jobs, const AttentionContext& context);
  const AttentionTotals& totals() const { return totals_; }

  struct Place {
    const AttentionJob* job;
    AttentionGeometry g;
    int64_t index;     ///< Of the task among those of its job.
    int64_t partials;  ///< Floats of the states of the jobs before.
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
