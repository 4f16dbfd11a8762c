// Range checks of the sampling options.
#pragma once

#include "marlin/device.h"
#include "marlin/sampling.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "plan/step/decoder_calls.h"
#include "plan/step/decoder_step.h"

namespace marlin {

/// The largest penalties, and the smallest repetition penalty: within them the logits of a model
/// stay finite.
inline constexpr double kMostPenalty = 1e6;
inline constexpr double kMostRepetitionPenalty = 1000;
inline constexpr double kLeastRepetitionPenalty = 0.001;

/// Errors: kInvalidArgument naming the option out of range.
Status CheckSampling(const SamplingOptions& options);

/// SampleTokens with all that SampleTokensCall has.
Status SampleRows(const Device& device, const SampleTokensCall& call, void* stream = nullptr);

/// Feeds sampled tokens, i32 [rows], to the next step (AdvanceTokensCall). Errors:
/// kInvalidArgument for types, shapes and overlaps, and for a count that is not below the steps,
/// which Synchronize reports unless device memory is host memory.
Status AdvanceTokens(const Device& device, const TensorView& sampled, const StepAdvance& advance,
                     void* stream = nullptr);

}  // namespace marlin
