// The rows of a step and their pages, as the CPU reads them.
#pragma once

#include <cstdint>

#include "backends/cpu/cpu_attention.h"
#include "marlin/decoder.h"
#include "marlin/status.h"

namespace marlin::cpu {

class PagedRows {
 public:
  PagedRows(const SequenceRows& rows, const PagedCache& cache) : rows_(rows), cache_(cache) {}

  /// Everything that the memory says: ascending rows, consecutive positions, and a page for every
  /// position that a row writes or sees through the window (0: all before it). Errors:
  /// kInvalidArgument.
  Status Check(int64_t window) const;

  // The rest is for after Check.
  int64_t sequences() const { return rows_.first_rows.dim(0) - 1; }
  int64_t FirstRow(int64_t sequence) const { return rows_.first_rows.As<int32_t>()[sequence]; }
  int64_t Position(int64_t row) const { return rows_.positions.As<int32_t>()[row]; }
  int64_t Tokens(int64_t sequence) const { return FirstRow(sequence + 1) - FirstRow(sequence); }
  /// Positions up to its last row's; 0 where it has no row.
  int64_t Length(int64_t sequence) const;
  int64_t SegmentsOf(int64_t sequence) const;

  /// The first byte of this cache's part of the page of a position.
  uint8_t* PageAt(int64_t sequence, int64_t position) const;

  /// Bytes of the addresses of all sequences' segments, of keys and values.
  int64_t SegmentBytes() const;
  /// The rows of a sequence as a job. Fills SegmentsOf addresses, and points the job at them; null:
  /// for its numbers alone.
  AttentionJob JobOf(int64_t sequence, const TensorView& queries, const MutableTensorView& out,
                     const uint8_t** segments) const;

 private:
  Status CheckSequence(int64_t sequence, int64_t window) const;
  /// Null: the page is not there.
  uint8_t* Page(int64_t page) const;
  const int32_t* TableOf(int64_t sequence) const {
    return rows_.block_tables.As<int32_t>() + sequence * rows_.block_tables.dim(1);
  }

  const SequenceRows& rows_;
  const PagedCache& cache_;
};

}  // namespace marlin::cpu
