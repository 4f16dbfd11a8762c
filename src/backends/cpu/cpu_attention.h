// How attention is cut into tasks, and where their memory lies.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cpu/decoder_kernels.h"
#include "marlin/decoder.h"

namespace marlin::cpu {

/// What all inputs of a call share.
struct AttentionContext {
  int64_t inputs;
  int64_t window;
  int64_t workers;
  const SegmentKernel* segment_kernel;  ///< Or null.
};

/// The numbers of one input.
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

  /// One of many inputs.
  static AttentionGeometry Of(const AttentionInput& input, const AttentionContext& context);

  /// Rows of a run, at most.
  int64_t rows() const { return tokens_per_run * group; }
  int64_t tasks() const { return apart ? runs * segment_parts * head_parts : runs * kv_heads; }
  int64_t merges() const { return apart ? runs * kv_heads : 0; }
  int64_t FirstKey(int64_t position) const;
  /// Whether the kernels read these keys or values where they are.
  bool ReadsInPlace(const TensorView& view) const;

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

/// All inputs' tasks as one list.
class AttentionSchedule {
 public:
  AttentionSchedule(std::span<const AttentionInput> inputs, const AttentionContext& context);
  int64_t tasks() const { return tasks_; }
  int64_t merges() const { return merges_; }
  int64_t scratch_floats() const { return scratch_floats_; }
  int64_t TotalFloats() const { return context_.workers * scratch_floats_ + partial_floats_; }

  struct Place {
    const AttentionInput* input;
    AttentionGeometry g;
    int64_t index;     ///< Of the task among those of its input.
    int64_t partials;  ///< Floats of the states of the inputs before.
  };
  Place FindTask(int64_t task) const { return Find(task, false); }
  Place FindMerge(int64_t merge) const { return Find(merge, true); }

 private:
  Place Find(int64_t index, bool merging) const;

  std::span<const AttentionInput> inputs_;
  AttentionContext context_;
  int64_t tasks_ = 0;
  int64_t merges_ = 0;
  int64_t scratch_floats_ = 0;
  int64_t partial_floats_ = 0;
};

}  // namespace marlin::cpu
