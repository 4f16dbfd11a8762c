// The arguments of the operations that decoder_operations.def lists. They have been validated as
// far as the host can: types, shapes, contiguous last dimensions, outputs that do not overlap
// inputs, and no empty view where elements are needed. All memory is the device's. The backend
// checks values in it (ids, positions): at once if device and host share memory, else by an error
// that Synchronize reports. References and spans are valid during the call only: work that runs
// later keeps copies.
#pragma once

#include <cstdint>
#include <span>

#include "base/macros.h"
#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "marlin/recurrent.h"
#include "marlin/sampling.h"
#include "marlin/weights.h"

namespace marlin {

/// out[t, :] = table[ids[t], :].
struct LookUpRowsCall {
  TensorView table;
  TensorView ids;  ///< i32 or i64 [rows of out].
  MutableTensorView out;
};

/// The same for prepared weights [k = columns of out, n = rows of the table].
struct LookUpWeightRowsCall {
  const PreparedWeights::Storage& table;
  TensorView ids;
  MutableTensorView out;
};

struct ConvertCall {
  TensorView x;
  MutableTensorView out;
};

struct RmsNormCall {
  TensorView x;
  TensorView weight;
  float epsilon;
  MutableTensorView out;
};

struct CenterRowsCall {
  MutableTensorView x;
};

struct AddToCall {
  TensorView y;
  MutableTensorView x;
  float scale;
};

struct AddRmsNormCall {
  TensorView block;
  MutableTensorView residual;
  TensorView weight;
  float epsilon;
  MutableTensorView out;
};

struct ApplyRotaryCall {
  const RotaryEmbedding& rotary;
  TensorView positions;  ///< i32 or i64 [tokens].
  MutableTensorView x;
};

struct ScaleByPositionCall {
  PositionScale scale;
  TensorView positions;  ///< i32 or i64 [tokens].
  MutableTensorView x;
};

struct ApplyGateCall {
  TensorView gate;
  TensorView up;
  MutableTensorView out;
  const GateOptions& options;
};

struct ApplySigmoidCall {
  MutableTensorView x;
};

struct ApplyOutputGateCall {
  TensorView gate;
  MutableTensorView x;
};

struct ScaleAndCapCall {
  MutableTensorView x;
  float scale;
  float softcap;
};

/// As ScaleInputs (ops/moe/moe.h).
struct ScaleInputsCall {
  MutableTensorView weights;  ///< [tokens, 1]
  MutableTensorView x;        ///< [tokens, features]
};

struct HeadProductCall {
  TensorView x;
  TensorView weights;
  MutableTensorView out;
  const HeadProductOptions& options;
};

/// As ExpandLatents.
struct ExpandLatentsCall {
  const PagedCache& latents;
  TensorView pages;
  TensorView tokens;
  TensorView key_weights;
  TensorView value_weights;
  const PagedCache& heads;
};

struct AttentionCall {
  std::span<const AttentionInput> inputs;
  const AttentionOptions& options;
};

struct AppendToCacheCall {
  TensorView keys;
  TensorView values;  ///< Empty if the cache stores the values as part of the keys.
  const SequenceRows& rows;
  const PagedCache& cache;
};

struct RotateAndAppendCall {
  const AttentionHeads& heads;
  const HeadNorms& norms;
  const RotaryEmbedding& rotary;
  const SequenceRows& rows;
  const PagedCache& cache;
};

/// RotateAndAppendCall as operations of their own, which `run` runs.
template <typename Run>
Status RunUnfused(const RotateAndAppendCall& call, const Run& run) {
  const auto prepare = [&](const MutableTensorView& x, const TensorView& norm) -> Status {
    if (!norm.empty()) MARLIN_RETURN_IF_ERROR(run(RmsNormCall{x, norm, call.norms.epsilon, x}));
    if (call.rotary.inverse_frequencies.empty()) return {};
    return run(ApplyRotaryCall{call.rotary, call.rows.positions, x});
  };
  MARLIN_RETURN_IF_ERROR(prepare(call.heads.queries, call.norms.queries));
  MARLIN_RETURN_IF_ERROR(prepare(call.heads.keys, call.norms.keys));
  return run(AppendToCacheCall{call.heads.keys, call.heads.values, call.rows, call.cache});
}

struct PagedAttentionCall {
  TensorView queries;
  const SequenceRows& rows;
  const PagedCache& cache;
  MutableTensorView out;
  const AttentionOptions& options;
};

struct RouteTokensCall {
  TensorView logits;
  const RouterOptions& options;
  MutableTensorView ids;
  MutableTensorView weights;
};

/// RouteTokens of the product of x and a router's matrix. Not validated: RoutesRows decides.
struct RouteRowsCall {
  TensorView x;  ///< [tokens, hidden]
  const PreparedWeights::Storage& matrix;
  TensorView bias;  ///< [experts], added to the logits, or empty.
  const RouterOptions& options;
  MutableTensorView ids;
  MutableTensorView weights;
};

struct ResetSamplerCall {
  const SamplingOptions& options;
  int64_t vocab;
  TensorView prompt;        ///< i32 [tokens].
  MutableTensorView state;  ///< u8 [sampler_state_bytes], aligned to 64 bytes.
};

struct SampleTokensCall {
  TensorView logits;
  MutableTensorView states;  ///< u8 [rows, sampler_state_bytes], or with state_rows any number.
  MutableTensorView tokens;  ///< i32 [rows].
  /// i32 [rows]: the state of each row; a negative number: the row is not sampled. Empty: row r has
  /// state r. Messages name states.
  TensorView state_rows = {};
  /// A row whose logits cannot be sampled is no error of the call: its token is a mark
  /// (sample_marks.h). Its state has not advanced.
  bool marks = false;
  /// u32 [masks, ceil(vocab / 32)], contiguous: bit i % 32 of word i / 32 allows token i. Applies
  /// to logits after penalties. Empty: every token is allowed.
  TensorView allowed = {};
  TensorView allowed_rows = {};  ///< i32 [rows]: the mask of each row; negative: none.
  /// i32 [rows], with state_rows, or empty. A row's draft: the next row has its state and is
  /// sampled only if the row's token is its draft, and otherwise marked kSkippedMark. Negative: the
  /// next row is another sequence's, as after the last row.
  TensorView drafts = {};
};

/// As LogProbabilities.
struct LogProbabilitiesCall {
  TensorView logits;
  TensorView ids;
  LogProbabilityRows out;
};

/// Between two steps of a recording: feeds the sampled tokens to the next step. Row r runs while
/// state_rows[r] >= 0. A running row stores tokens[r, counts[r]++] = sampled[r] and advances
/// positions[r] by 1; a stop id ends it (state_rows[r] = -1), and any other token becomes ids[r].
/// So a row that has ended keeps feeding the last token that it fed, at the position after its end.
/// A negative token, the mark of a row whose logits cannot be sampled, ends the row as its
/// state_rows[r], and is not stored. All views but `tokens` are contiguous vectors of i32.
struct AdvanceTokensCall {
  TensorView sampled;   ///< [rows]
  TensorView stop_ids;  ///< Any number, also none.
  MutableTensorView ids;
  MutableTensorView positions;
  MutableTensorView state_rows;
  MutableTensorView counts;
  MutableTensorView tokens;  ///< i32 [rows, steps], contiguous; counts are less than steps.
};

/// GatedDelta.
struct GatedDeltaCall {
  const GatedDeltaInputs& inputs;
  const GatedDeltaWeights& weights;
  const GatedDeltaSizes& sizes;
  const RecurrentRows& rows;
  const RecurrentStates& states;
  MutableTensorView out;
  Determinism determinism = Determinism::kDefault;
};

/// Mamba2. Optional weights may have no data.
struct Mamba2Call {
  const Mamba2Inputs& inputs;
  const Mamba2Weights& weights;
  const Mamba2Sizes& sizes;
  const RecurrentRows& rows;
  const RecurrentStates& states;
  MutableTensorView out;
  Determinism determinism = Determinism::kDefault;
};

/// ShortConvolution. The bias may have no data.
struct ShortConvolutionCall {
  const ShortConvolutionInputs& inputs;
  const ShortConvolutionWeights& weights;
  const ShortConvolutionSizes& sizes;
  const RecurrentRows& rows;
  const RecurrentStates& states;
  MutableTensorView out;
};

}  // namespace marlin
