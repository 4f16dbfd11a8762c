// One Decode call of a model: its steps, several per pass where the device records passes.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// Steps of a pass, at most: a power of two, as all are. More save little, because the host's work
/// between passes is then small compared with the steps, and a sequence that ends wastes the rest.
inline constexpr int64_t kMostDecodeSteps = 8;

/// The arguments of Model::Decode.
struct DecodeCall {
  std::span<const DecodeInput> inputs;
  MutableTensorView samplers;
  DecodeOptions options;
  std::span<int32_t> tokens;
  std::span<int64_t> counts;
};

/// Runs a checked call, whose sequences the caller has claimed. `steps_run`, if not null: the steps
/// that the device ran, including steps after the end of all sequences. A row whose logits cannot
/// be sampled ends, and has its mark (sample_marks.h) after its tokens; other elements of `tokens`
/// without one are 0. Errors: as the operations; the sequences have then grown by `counts`.
Status RunDecode(const Model::Impl& model, const DecodeCall& call, int64_t* steps_run = nullptr);

}  // namespace marlin
