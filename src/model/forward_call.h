// One call of a model: runs its tokens in passes of bounded size and returns the results.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

class RoutingObserver;
class StepTimer;

/// The requested results of a call: logits in host memory, or sampled tokens.
struct Wanted {
  MutableTensorView logits;    ///< f32 [rows, vocab], or empty.
  MutableTensorView samplers;  ///< u8 [inputs, SamplerStateBytes] in device memory, or empty.
  std::span<int32_t> tokens;   ///< One per input, if there are samplers.
  RoutingObserver* routing = nullptr;
  StepTimer* timer = nullptr;  ///< Times every pass, which is then not recorded.
};

/// Runs checked inputs, whose sequences the caller has claimed. Errors: those of the operations;
/// the sequences are then unchanged.
Status RunForward(const Model::Impl& model, std::span<const SequenceInput> inputs,
                  const Wanted& wanted);

}  // namespace marlin
