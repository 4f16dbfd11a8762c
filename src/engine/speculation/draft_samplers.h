// How drafts choose tokens: as the text's own sampler would.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/batch/sampler_slots.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// The samplers of the texts that a draft guesses together. With the state of a text's sampler one
/// draws with the same random numbers, so that a guess is mostly the token that the model samples
/// where their distributions agree. Whatever it draws, the text's own sampler decides.
class DraftSamplers {
 public:
  /// Errors: kOutOfMemory.
  static Result<std::shared_ptr<DraftSamplers>> Make(const Model& draft);

  /// The states to guess with, u8 [texts, SamplerStateBytes], of fewer texts where the memory has
  /// no room for all: a copy of each element of `texts`, or a greedy one if that is empty or a
  /// state of another size.
  Result<MutableTensorView> Begin(std::span<const std::span<const uint8_t>> texts);

 private:
  DraftSamplers(const Model& draft, SamplerSlots slots, std::vector<uint8_t> greedy)
      : device_(draft.device()),
        vocab_(draft.info().vocab_size),
        slots_(std::move(slots)),
        greedy_(std::move(greedy)),
        is_greedy_(1, true) {}

  Device device_;
  int64_t vocab_;
  SamplerSlots slots_;
  int64_t tried_ = 1;            ///< Slots that were asked for, at most.
  std::vector<uint8_t> greedy_;  ///< A greedy state. One remains greedy when it advances.
  std::vector<bool> is_greedy_;  ///< One per slot.
};

}  // namespace marlin
