// The sequences of a step of a recurrent mixer, their states, and the causal convolutions of their
// rows.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_SEQUENCES_H_
#define MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_SEQUENCES_H_

#include "backends/metal/kernels/epilogue.h"
#include "backends/metal/kernels/recurrent/recurrent_parameters.h"

namespace marlin {
namespace kernels {

struct SequenceMemory {
  device const int* taking;
  device const int* first_rows;
  device const int* pages;
};

/// The rows of a sequence, and its states before and after them.
struct SequenceRows {
  int first;
  int end;
  device const float* from;  ///< Null: zeros.
  device float* to;          ///< Null: there is nothing to do.
};

static inline device float* StateAt(int page, constant RecurrentPlaces& places) {
  if (page < 0) return nullptr;
  const int slab = page / places.slab_pages;
  if (slab >= places.slab_count || places.slabs[slab] == 0) return nullptr;
  const long element =
      (page - slab * places.slab_pages) * places.page_stride + places.first_element;
  return (device float*)ulong(places.slabs[slab]) + element;
}

/// Whether element `sequence` of first_rows is wrong.
static inline bool IsWrongRow(device const int* first_rows, int sequence,
                              constant RecurrentPlaces& places) {
  const int row = first_rows[sequence];
  if (sequence == 0) return row != 0;
  return row < first_rows[sequence - 1] || row > places.rows ||
         (sequence == places.sequences && row != places.rows);
}

/// Whether first_rows ascend from 0 to the number of rows. Called by a simdgroup.
static METAL_FUNC bool RowsAreRight(device const int* first_rows, ushort lane,
                                    constant RecurrentPlaces& places) {
  bool wrong = false;
  for (int sequence = lane; sequence <= places.sequences; sequence += kLanes) {
    wrong = wrong || IsWrongRow(first_rows, sequence, places);
  }
  return !metal::simd_any(wrong);
}

/// Precondition: RowsAreRight. `wrong_page`: the first page that does not exist, if *is_wrong.
static METAL_FUNC SequenceRows SequenceAt(SequenceMemory memory, int sequence,
                                          constant RecurrentPlaces& places, thread bool* is_wrong,
                                          thread int* wrong_page) {
  SequenceRows rows = {memory.first_rows[sequence], memory.first_rows[sequence + 1], nullptr,
                       nullptr};
  bool moves = false;
  for (int row = rows.first; row < rows.end && !moves; ++row) moves = memory.taking[row] >= 0;
  const int before = memory.pages[2 * sequence];
  const int after = memory.pages[2 * sequence + 1];
  rows.from = StateAt(before, places);
  device float* const to = StateAt(after, places);
  const bool wrong_before = rows.from == nullptr && before != -1;
  const bool wrong_after = to == nullptr && (moves || after != -1);
  *is_wrong = wrong_before || wrong_after;
  *wrong_page = wrong_before ? before : after;
  if (!*is_wrong) rows.to = to;
  return rows;
}

/// Whether a sequence has a state to write. `reports`: the thread that reports what is wrong with
/// it. Called by a simdgroup.
static METAL_FUNC bool FindSequence(SequenceMemory memory, int sequence, bool reports, ushort lane,
                                    device int4* errors, constant RecurrentPlaces& places,
                                    thread SequenceRows* rows) {
  if (!RowsAreRight(memory.first_rows, lane, places)) {
    for (int i = sequence; reports && i <= sequence + 1; ++i) {
      // The last sequence also reports the end.
      if (i > sequence && i < places.sequences) break;
      if (IsWrongRow(memory.first_rows, i, places)) {
        errors[i] = int4(kWrongFirstRow, memory.first_rows[i], 0, 0);
      }
    }
    return false;
  }
  bool is_wrong = false;
  int wrong_page = 0;
  *rows = SequenceAt(memory, sequence, places, &is_wrong, &wrong_page);
  if (reports && is_wrong) errors[sequence] = int4(kNoStatePage, wrong_page, 0, 0);
  return rows->to != nullptr;
}

/// The sequence of a row: the last that begins at or before it.
static inline int SequenceOfRow(device const int* first_rows, int row, int sequences) {
  int sequence = 0;
  int end = sequences;
  while (sequence + 1 < end) {
    const int middle = sequence + (end - sequence) / 2;
    if (first_rows[middle] <= row) {
      sequence = middle;
    } else {
      end = middle;
    }
  }
  return sequence;
}

/// A channel of a convolution's input: of rows in memory, or the product of two such channels.
struct ConvChannel {
  device const float* rows;
  device const float* factors;
  long row_stride;
  long factor_stride;
  bool multiplies;
};

struct ConvMemory {
  device const float* inputs[kConvInputs];
};

static METAL_FUNC ConvChannel ChannelAt(ConvMemory memory, int channel,
                                        constant ConvParameters& conv) {
  if (conv.multiplies) {
    const ConvChannel product = {memory.inputs[0] + channel, memory.inputs[1] + channel,
                                 conv.inputs[0].row, conv.inputs[1].row, true};
    return product;
  }
  ConvChannel found = {nullptr, nullptr, 0, 0, false};
  MARLIN_UNROLL
  for (int i = 0; i < kConvInputs; ++i) {
    const int width = conv.widths[i];
    const int count = conv.heads[i] * width;
    if (channel >= 0 && channel < count) {
      const int head = channel / width;
      found.rows = memory.inputs[i] + head * conv.inputs[i].head + (channel - head * width);
      found.row_stride = conv.inputs[i].row;
    }
    channel -= count;
  }
  return found;
}

static inline float InputAt(ConvChannel channel, int row) {
  const float x = channel.rows[row * channel.row_stride];
  return channel.multiplies ? x * channel.factors[row * channel.factor_stride] : x;
}

/// The convolution of a channel at a row, the newest input first: the order depends on nothing
/// else. `window`: the channel in the state before the sequence's rows, or null.
static METAL_FUNC float Convolved(ConvChannel channel, device const float* weights, float bias,
                                  device const int* taking, int row, int first_row,
                                  device const float* window, constant ConvParameters& conv) {
  int tap = conv.conv_width - 1;
  float sum = metal::fma(weights[tap], InputAt(channel, row), bias);
  int found = 0;
  for (int before = row - 1; before >= first_row && found + 1 < conv.conv_width; --before) {
    if (taking[before] < 0) continue;
    ++found;
    sum = metal::fma(weights[tap - found], InputAt(channel, before), sum);
  }
  if (window == nullptr) return sum;
  for (tap -= found + 1; tap >= 0; --tap) {
    sum = metal::fma(weights[tap], window[long(tap + found) * conv.channels], sum);
  }
  return sum;
}

/// Replaces the inputs of a channel in a state by the last ones. In place, what is read has not
/// been written.
static METAL_FUNC void StoreWindow(ConvChannel channel, device const int* taking, SequenceRows rows,
                                   int index, constant ConvParameters& conv) {
  const int kept = conv.conv_width - 1;
  int found = 0;
  int row = rows.end;
  while (row > rows.first && found < kept) found += taking[--row] >= 0 ? 1 : 0;
  for (int slot = 0; slot < kept; ++slot) {
    float value = 0.0f;
    if (slot + found < kept) {
      if (rows.from != nullptr) value = rows.from[long(slot + found) * conv.channels + index];
    } else {
      while (taking[row] < 0) ++row;
      value = InputAt(channel, row++);
    }
    rows.to[long(slot) * conv.channels + index] = value;
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_SEQUENCES_H_
