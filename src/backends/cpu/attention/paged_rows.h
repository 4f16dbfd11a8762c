// The rows of a decoder step and their KV cache pages, as read by the CPU.
#pragma once

#include <cstdint>

#include "backends/cpu/attention/cpu_attention.h"
#include "marlin/decoder.h"
#include "marlin/status.h"

namespace marlin::cpu {

/// First byte of a cache's part of a page; null if there is no such page.
uint8_t* PageOf(const PagedCache& cache, int64_t page);

class PagedRows {
 public:
  PagedRows(const SequenceRows& rows, const PagedCache& cache) : rows_(rows), cache_(cache) {}

  /// Validates the contents of the tensors: ascending first_rows, consecutive positions, and a page
  /// for every position that a row writes or sees in its window (0: all positions before it).
  /// Errors: kInvalidArgument.
  Status Check(int64_t window) const;

  // Precondition of all below: Check succeeded.
  int64_t sequences() const { return rows_.first_rows.dim(0) - 1; }
  int64_t FirstRow(int64_t sequence) const { return rows_.first_rows.As<int32_t>()[sequence]; }
  int64_t Position(int64_t row) const { return rows_.positions.As<int32_t>()[row]; }
  int64_t Tokens(int64_t sequence) const { return FirstRow(sequence + 1) - FirstRow(sequence); }
  /// KV length: the position of the sequence's last row plus 1; 0 if it has no row.
  int64_t Length(int64_t sequence) const;
  int64_t SegmentsOf(int64_t sequence) const;

  /// First byte of this cache's part of the page that holds a position.
  uint8_t* PageAt(int64_t sequence, int64_t position) const;

  /// Bytes of the segment address arrays of all sequences, for keys and values.
  int64_t SegmentBytes() const;
  /// The rows of a sequence as a job. Fills `segments` with SegmentsOf addresses, which the job
  /// then references; null: the job is used for its sizes only.
  AttentionJob JobOf(int64_t sequence, const TensorView& queries, const MutableTensorView& out,
                     const uint8_t** segments) const;

 private:
  Status CheckSequence(int64_t sequence, int64_t window) const;
  uint8_t* Page(int64_t page) const { return PageOf(cache_, page); }
  const int32_t* TableOf(int64_t sequence) const {
    return rows_.block_tables.As<int32_t>() + sequence * rows_.block_tables.dim(1);
  }

  const SequenceRows& rows_;
  const PagedCache& cache_;
};

}  // namespace marlin::cpu
