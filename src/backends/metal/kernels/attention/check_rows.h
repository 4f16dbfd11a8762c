// CheckRows: whether the rows of a step can be followed to their keys. One threadgroup checks all
// of them, in the order of the CPU, so that its report does not depend on timing.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_CHECK_ROWS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_CHECK_ROWS_H_

#include "backends/metal/kernels/attention/attend_rows.h"

namespace marlin {
namespace kernels {

constant constexpr uint kNothingWrong = 0xffffffffu;
/// A place in a sequence: its RowError from this bit on, a row or a block below.
constant constexpr int kRowErrorBit = 28;

/// The first thing that is wrong, as far as a thread has seen.
struct FirstWrong {
  uint sequence;
  uint place;
};

static inline void NoteWrong(thread FirstWrong& first, int sequence, RowError error, int at) {
  const uint place = (uint(error) << kRowErrorBit) | uint(at);
  if (uint(sequence) > first.sequence) return;
  first.place = uint(sequence) < first.sequence ? place : metal::min(first.place, place);
  first.sequence = uint(sequence);
}

/// The least of all threads' numbers.
static METAL_FUNC uint LeastOfThreads(threadgroup uint* scratch, uint value, int thread_index) {
  const uint least = metal::simd_min(value);
  if (thread_index % kLanes == 0) scratch[thread_index / kLanes] = least;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  uint of_all = scratch[0];
  for (int i = 1; i < kAttendSimdgroups; ++i) of_all = metal::min(of_all, scratch[i]);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return of_all;
}

/// The first of first_rows that does not ascend from 0 to the number of rows.
static inline uint FirstWrongSequence(device const int* first_rows, int thread_index,
                                      constant PagedRows& p) {
  for (int i = thread_index; i <= p.sequences; i += kAttendThreads) {
    const int value = first_rows[i];
    const int least = i == 0 ? 0 : first_rows[i - 1];
    const int most = i == 0 ? 0 : p.rows;
    if (value < least || value > most || (i == p.sequences && value != p.rows)) return uint(i);
  }
  return kNothingWrong;
}

static inline void CheckPosition(AttendMemory memory, int row, constant PagedRows& p,
                                 thread FirstWrong& first) {
  const int sequence = SequenceOf(memory.first_rows, row, p);
  const int begin = memory.first_rows[sequence];
  const int origin = memory.positions[begin];
  if (row == begin && origin < 0) NoteWrong(first, sequence, kNegativePosition, row);
  if (long(memory.positions[row]) != long(origin) + (row - begin)) {
    NoteWrong(first, sequence, kWrongNextPosition, row);
  }
}

/// Checks a block of a sequence, and with the first one that the table has all of them.
static inline void CheckBlock(AttendMemory memory, int sequence, int block,
                              constant AttendParameters& p, thread FirstWrong& first) {
  const RowSpan rows = RowsOfSequence(memory.first_rows, sequence, p.pages);
  if (rows.begin == rows.end) return;
  const int last = memory.positions[rows.end - 1];
  const int last_block = last / p.pages.page_tokens;
  if (block == 0 && last_block >= p.pages.blocks) {
    NoteWrong(first, sequence, kNoBlock, rows.end - 1);
  }
  const int seen = FirstVisibleKey(metal::max(memory.positions[rows.begin], 0), p);
  if (last < 0 || block < seen / p.pages.page_tokens || block > last_block) return;
  if (block >= p.pages.blocks) return;
  const int page = memory.block_tables[long(sequence) * p.pages.blocks + block];
  if (PageOf(page, 1, p.pages) == nullptr) NoteWrong(first, sequence, kNoPage, block);
}

/// Checks the block of a row's own position, and that the table has all of its sequence's.
static inline void CheckBlockOfRow(AttendMemory memory, int row, constant AttendParameters& p,
                                   thread FirstWrong& first) {
  const int sequence = SequenceOf(memory.first_rows, row, p.pages);
  const int block = metal::max(memory.positions[row], 0) / p.pages.page_tokens;
  CheckBlock(memory, sequence, 0, p, first);
  if (block > 0) CheckBlock(memory, sequence, block, p, first);
}

static inline void ReportWrong(AttendMemory memory, FirstWrong wrong, constant PagedRows& p,
                               device int4* report) {
  const int sequence = int(wrong.sequence);
  const int error = int(wrong.place >> kRowErrorBit);
  const int at = int(wrong.place & ((1u << kRowErrorBit) - 1u));
  int a = 0;
  int c = sequence;
  if (error == kNoPage) {
    a = memory.block_tables[long(sequence) * p.blocks + at];
  } else {
    const int begin = memory.first_rows[sequence];
    a = memory.positions[at];
    c = int(uint(memory.positions[begin]) + uint(at - begin));
  }
  *report = int4(error, a, at, c);
}

/// Called by all threads of a threadgroup; `scratch` has room for kAttendSimdgroups.
static METAL_FUNC void CheckRows(threadgroup uint* scratch, AttendMemory memory,
                                 device int4* report, int thread_index,
                                 constant AttendParameters& p) {
  const uint wrong = LeastOfThreads(
      scratch, FirstWrongSequence(memory.first_rows, thread_index, p.pages), thread_index);
  if (wrong != kNothingWrong) {
    if (thread_index != 0) return;
    *report = int4(kWrongFirstRows, memory.first_rows[wrong], int(wrong), 0);
    return;
  }
  FirstWrong first = {kNothingWrong, kNothingWrong};
  for (int row = thread_index; row < p.pages.rows; row += kAttendThreads) {
    CheckPosition(memory, row, p.pages, first);
  }
  // Rows that see only themselves need few blocks of a long table.
  const bool own = p.window == 1;
  for (int row = thread_index; own && row < p.pages.rows; row += kAttendThreads) {
    CheckBlockOfRow(memory, row, p, first);
  }
  const int blocks = metal::max(p.pages.blocks, 1);
  const long all = own ? 0l : long(p.pages.sequences) * blocks;
  for (long i = thread_index; i < all; i += kAttendThreads) {
    CheckBlock(memory, int(i / blocks), int(i % blocks), p, first);
  }
  FirstWrong least;
  least.sequence = LeastOfThreads(scratch, first.sequence, thread_index);
  least.place = LeastOfThreads(
      scratch, first.sequence == least.sequence ? first.place : kNothingWrong, thread_index);
  if (least.sequence != kNothingWrong && thread_index == 0) {
    ReportWrong(memory, least, p.pages, report);
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_CHECK_ROWS_H_
