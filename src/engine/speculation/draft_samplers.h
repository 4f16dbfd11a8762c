// How drafts choose tokens: as the text's own sampler would.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "engine/batch/sampler_slots.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// The sampler of the texts that a draft guesses, one at a time. With the state of a text's sampler
/// it draws with the same random numbers, so that a guess is mostly the token that the model
/// samples where their distributions agree. Whatever it draws, the text's own sampler decides.
class DraftSamplers {
 public:
  /// Errors: kOutOfMemory.
  static Result<std::shared_ptr<DraftSamplers>> Make(const Model& draft);

  /// The state to guess with, u8 [1, SamplerStateBytes]: a copy of `text`, or a greedy one if that
  /// is empty or a state of another size.
  Result<MutableTensorView> Begin(std::span<const uint8_t> text);

 private:
  explicit DraftSamplers(SamplerSlots slots) : slots_(std::move(slots)) {}
  SamplerSlots slots_;  ///< The first one is greedy.
};

}  // namespace marlin
