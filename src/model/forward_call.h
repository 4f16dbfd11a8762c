// One call of a model: its tokens in passes of bounded size, and the results.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// The results of a call: logits in the host's memory, or sampled tokens.
struct Wanted {
  MutableTensorView logits;    ///< f32 [rows, vocab], or empty.
  MutableTensorView samplers;  ///< u8 [inputs, SamplerStateBytes] in the device's memory, or empty.
  std::span<int32_t> tokens;   ///< One an input, where there are samplers.
};

/// Feeds checked inputs, whose sequences the caller has claimed. Errors: those of the operations;
/// the sequences are unchanged then.
Status RunForward(const Model::Impl& model, std::span<const SequenceInput> inputs,
                  const Wanted& wanted);

}  // namespace marlin
