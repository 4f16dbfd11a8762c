// Rows, sequences and pages of a step, read on the device. Wrong values are recorded and never
// followed.
#pragma once

#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/rows/record_error.cuh"

namespace marlin::cuda {

/// The first row of a sequence, within the rows that there are.
MARLIN_DEVICE int FirstRow(const SequencesView& sequences, int sequence) {
  return min(max(sequences.first_rows[sequence], 0), sequences.rows);
}

/// Records first_rows that do not ascend from 0 to the number of rows. Called by all threads of a
/// CTA.
MARLIN_DEVICE void CheckFirstRows(const SequencesView& sequences, const ErrorView& errors) {
  for (int i = static_cast<int>(threadIdx.x); i <= sequences.count;
       i += static_cast<int>(blockDim.x)) {
    const int value = sequences.first_rows[i];
    const int least = i == 0 ? 0 : sequences.first_rows[i - 1];
    const int most = i == 0 ? 0 : sequences.rows;
    if (value < least || value > most || (i == sequences.count && value != sequences.rows)) {
      RecordError(errors, ValueError::kFirstRows, value, i, sequences.rows);
    }
  }
}

/// The sequence of a row: the last that begins at or before it. The sequences ascend.
MARLIN_DEVICE int SequenceOf(const SequencesView& sequences, int row) {
  // Where every sequence has one row, as in decode, the first guess is right.
  if (row < sequences.count && sequences.first_rows[row] == row &&
      sequences.first_rows[row + 1] > row) {
    return row;
  }
  int low = 0;
  int high = sequences.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (sequences.first_rows[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Records a negative position, and one that does not follow the position of the row before.
MARLIN_DEVICE bool CheckPosition(const SequencesView& sequences, int sequence, int row,
                                 const ErrorView& errors) {
  const int position = sequences.positions[row];
  if (position < 0) {
    RecordError(errors, ValueError::kPosition, position, row);
    return false;
  }
  if (row == FirstRow(sequences, sequence)) return true;
  const int64_t expected = int64_t{sequences.positions[row - 1]} + 1;
  if (position == expected) return true;
  RecordError(errors, ValueError::kNextPosition, position, row, expected);
  return false;
}

/// The page of a block of a sequence; null if there is none. Precondition: block < blocks.
MARLIN_DEVICE uint8_t* PageOf(const SequencesView& sequences, const PagesView& pages, int sequence,
                              int block) {
  const int page =
      sequences.block_tables[static_cast<int64_t>(sequence) * sequences.blocks + block];
  if (page < 0) return nullptr;
  const auto number = static_cast<uint32_t>(page);
  const uint32_t slab = number / pages.slab_pages;
  if (slab >= static_cast<uint32_t>(pages.slab_count)) return nullptr;
  auto* const data = static_cast<uint8_t*>(pages.more_slabs != nullptr ? pages.more_slabs[slab]
                                                                       : pages.slabs[slab]);
  if (data == nullptr) return nullptr;
  const uint32_t of_slab = number - slab * pages.slab_pages;
  const int64_t element = of_slab * pages.page_stride + pages.first_element;
  return data + element * CacheElementBytes(pages.type);
}

/// PageOf the block of a position, or null with a record of why.
MARLIN_DEVICE uint8_t* FindPage(const SequencesView& sequences, const PagesView& pages,
                                int sequence, int position, const ErrorView& errors) {
  const int block = position / pages.page_tokens;
  if (block >= sequences.blocks) {
    RecordError(errors, ValueError::kBlock, position, block, sequences.blocks);
    return nullptr;
  }
  uint8_t* const page = PageOf(sequences, pages, sequence, block);
  if (page == nullptr) {
    const int64_t at = static_cast<int64_t>(sequence) * sequences.blocks + block;
    RecordError(errors, ValueError::kPage, sequences.block_tables[at], block, sequence);
  }
  return page;
}

/// The page of a row's position. Null, with a record of why, if there is none.
MARLIN_DEVICE uint8_t* PageOfRow(const SequencesView& sequences, const PagesView& pages, int row,
                                 const ErrorView& errors) {
  const int sequence = SequenceOf(sequences, row);
  if (!CheckPosition(sequences, sequence, row, errors)) return nullptr;
  return FindPage(sequences, pages, sequence, sequences.positions[row], errors);
}

/// A valid address, aligned to 16 bytes, for copies that read nothing.
MARLIN_DEVICE const uint8_t* AnyAlignedAddress(const SequencesView& sequences) {
  return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(sequences.positions) &
                                          ~uintptr_t{15});
}

/// Elements of a page before its values.
MARLIN_DEVICE int64_t KeyElements(const PagesView& pages) {
  return static_cast<int64_t>(pages.kv_heads) * pages.page_tokens * pages.key_dim;
}

}  // namespace marlin::cuda
