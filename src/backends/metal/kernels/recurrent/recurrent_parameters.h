// The contract between host and kernels for recurrent mixers. Compiles as C++20 and as Metal
// Shading Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

MARLIN_SHARED int kRecurrentThreads = 256;  ///< In every threadgroup.
MARLIN_SHARED int kRecurrentSimdgroups = kRecurrentThreads / kLanes;
MARLIN_SHARED int kQuadColumns = 4;  ///< Columns of a state that a simdgroup has in registers.
/// Columns of a state that a threadgroup has.
MARLIN_SHARED int kSliceColumns = kRecurrentSimdgroups * kQuadColumns;
/// Rows of a state, of which a lane has an eighth of 64 in registers.
MARLIN_SHARED int kMostStateRows = 256;
/// The most slabs of states: setBytes passes at most 4 KiB.
MARLIN_SHARED int kMostStateSlabs = 256;
MARLIN_SHARED int kConvInputs = 3;

/// Sequences, and the pages with their states.
struct RecurrentPlaces {
  MARLIN_INT64 page_stride;    ///< Elements from page to page of a slab.
  MARLIN_INT64 first_element;  ///< The layer's part of a page begins there.
  MARLIN_INT32 rows;
  MARLIN_INT32 sequences;
  MARLIN_INT32 slab_pages;
  MARLIN_INT32 slab_count;
  MARLIN_INT64 slabs[kMostStateSlabs];  ///< Addresses; 0: not allocated.
};

/// Heads of rows; strides in elements.
struct HeadStrides {
  MARLIN_INT64 row;
  MARLIN_INT64 head;
};

/// The channels of a convolution: its inputs' features, one after another.
struct ConvParameters {
  HeadStrides inputs[kConvInputs];
  MARLIN_INT32 heads[kConvInputs];
  MARLIN_INT32 widths[kConvInputs];  ///< Features of a head.
  MARLIN_INT32 channels;
  MARLIN_INT32 conv_width;
  MARLIN_INT32 has_bias;
  MARLIN_INT32 multiplies;  ///< ShortConvolution: input 0 times input 1.
};

/// The matrices of a state, from the next multiple of 32 after the convolution's inputs on:
/// [heads][state_rows][columns]. Keys and queries have key heads, which `group` heads share.
struct ScanParameters {
  RecurrentPlaces places;
  ConvParameters conv;
  HeadStrides writes;  ///< Mamba2: of steps.
  HeadStrides decays;
  MARLIN_INT32 heads;
  MARLIN_INT32 group;
  MARLIN_INT32 state_rows;
  MARLIN_INT32 columns;
  MARLIN_INT32 first_keys;  ///< Channels of a row, as first_queries and first_values.
  MARLIN_INT32 first_queries;
  MARLIN_INT32 first_values;
  float min_step;
  float max_step;
};

/// The norms and gates of the sums of rows.
struct MixerFinishParameters {
  HeadStrides out;
  HeadStrides gates;  ///< Heads of `gate_group` heads' features.
  MARLIN_INT32 rows;
  MARLIN_INT32 heads;
  MARLIN_INT32 columns;
  MARLIN_INT32 gate_group;
  MARLIN_INT32 norm_heads;  ///< Heads that are normed together.
  MARLIN_INT32 has_norm;
  MARLIN_INT32 shares_norm;  ///< All heads have the weights of the first.
  MARLIN_INT32 norm_before_gate;
  float epsilon;
};

struct MixParameters {
  RecurrentPlaces places;
  ConvParameters conv;
  HeadStrides out;         ///< ShortConvolution: of the results.
  MARLIN_INT64 out_gates;  ///< ShortConvolution: elements from row to row.
};

/// Errors of a sequence: {error, value}. Words are [sequences + 1], of which the last one
/// is the end of first_rows.
enum SequenceError { kSequenceIsRight, kWrongFirstRow, kNoStatePage };

// Indices of the buffers. Absent ones are bound to a buffer that is not read.
#define MARLIN_BUFFER_CONV_INPUT_0 0
#define MARLIN_BUFFER_CONV_INPUT_1 1
#define MARLIN_BUFFER_CONV_INPUT_2 2
#define MARLIN_BUFFER_TAKING 3         // i32 [rows]: the sign says whether a row takes part.
#define MARLIN_BUFFER_SEQUENCE_ROWS 4  // i32 [sequences + 1]
#define MARLIN_BUFFER_STATE_PAGES 5    // i32 [sequences][2]
#define MARLIN_BUFFER_MIXED 6          // f32 [rows][channels]: SiLU of the convolution.
#define MARLIN_BUFFER_MIXER_SUMS 7     // f32 [rows][heads][columns]
#define MARLIN_BUFFER_CONV_WEIGHTS 8   // f32 [channels][conv_width]
#define MARLIN_BUFFER_CONV_BIAS 10     // f32 [channels]
#define MARLIN_BUFFER_MIXER_OUT 11
#define MARLIN_BUFFER_MIXER_GATES 12
#define MARLIN_BUFFER_MIXER_NORM 13
#define MARLIN_BUFFER_SEQUENCE_ERRORS 8  // int4 [sequences + 1]
#define MARLIN_BUFFER_MIXER_WRITES 10    // Or steps.
#define MARLIN_BUFFER_MIXER_DECAYS 11
#define MARLIN_BUFFER_LOG_DECAYS 12    // f32 [heads]
#define MARLIN_BUFFER_DECAY_BIASES 13  // f32 [heads]: of decays or steps.
#define MARLIN_BUFFER_MIXER_SKIPS 14   // f32 [heads]

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_RECURRENT_RECURRENT_PARAMETERS_H_
