// The contract between host and kernels for sampling. Compiles as C++20 and as Metal Shading
// Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_PARAMETERS_H_

#include "backends/metal/kernels/parameters.h"
#include "plan/integers/sampler_state.h"

namespace marlin {
namespace kernels {

MARLIN_SHARED int kSampleThreads = 1024;  ///< In a threadgroup, which takes a row.
MARLIN_SHARED int kSampleSimdgroups = kSampleThreads / kLanes;

/// SampleTokensCall.
struct SampleParameters {
  MARLIN_INT64 logits_stride;  ///< Elements from row to row.
  MARLIN_INT64 state_bytes;    ///< From state to state.
  MARLIN_INT32 first_row;      ///< This launch's.
  MARLIN_INT32 rows;           ///< The call's.
  MARLIN_INT32 states;
  MARLIN_INT32 vocab;
  MARLIN_INT32 has_state_rows;
  MARLIN_INT32 has_drafts;
  MARLIN_INT32 masks;  ///< 0: none.
  MARLIN_INT32 mask_words;
};

struct ResetParameters {
  DrawOptions options;
  MARLIN_INT64 prompt_tokens;
  MARLIN_INT64 vocab;
};

/// LogProbabilitiesCall.
struct LogProbabilityParameters {
  MARLIN_INT64 logits_stride;
  MARLIN_INT32 first_row;  ///< This launch's.
  MARLIN_INT32 vocab;
  MARLIN_INT32 likely;  ///< Most likely tokens of a row that are wanted.
};

/// Reports of a row with its state row, if not a mark (plan/integers/token_marks.h).
enum SampleError { kSampledOrMarked, kNoSuchState, kStateNotReset };

// Indices of the buffers, besides MARLIN_BUFFER_PARAMETERS. An error is an int4, of which the last
// two are 0: of a row of samples {state row, SampleError or mark}, of a prompt {place, id}, of a
// row of log-probabilities {0, id}; without one the first is -1.
#define MARLIN_BUFFER_LOGITS 0
#define MARLIN_BUFFER_SAMPLER_STATES 1
#define MARLIN_BUFFER_TOKENS 2      // i32 [rows]
#define MARLIN_BUFFER_STATE_ROWS 3  // i32 [rows]; read if has_state_rows.
#define MARLIN_BUFFER_ALLOWED 4     // u32 [masks][mask_words]
#define MARLIN_BUFFER_ALLOWED_ROWS 5
#define MARLIN_BUFFER_DRAFTS 6
#define MARLIN_BUFFER_SAMPLE_ERRORS 7  // int4 [rows]
#define MARLIN_BUFFER_PROMPT 2         // i32 [prompt_tokens]
#define MARLIN_BUFFER_SAMPLE_IDS 2     // i32 [rows]
#define MARLIN_BUFFER_OF_IDS 3         // f32 [rows]
#define MARLIN_BUFFER_LIKELY_IDS 4     // i32 [rows][likely]
#define MARLIN_BUFFER_OF_LIKELY 5      // f32 [rows][likely]

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_SAMPLING_SAMPLE_PARAMETERS_H_
