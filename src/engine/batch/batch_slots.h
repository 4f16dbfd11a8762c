// Which text of a continuous batch has which sampler state.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/batch/batch_text.h"
#include "engine/batch/sampler_slots.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// The slots of the texts that have been sampled from: the first ones, without gaps while a pass
/// runs.
class BatchSlots {
 public:
  explicit BatchSlots(SamplerSlots samplers) : samplers_(std::move(samplers)) {}

  int64_t count() const { return samplers_.count(); }
  /// The text of each slot; null for one that has left since Fill.
  std::span<BatchText* const> texts() const { return texts_; }
  MutableTensorView states() const { return samplers_.First(std::ssize(texts_)); }

  /// Gives slots to the texts that sample for the first time since they started; returns those.
  std::vector<BatchText*> Enter(std::span<BatchText* const> running);
  /// Writes the sampler states of texts that got slots, and closes the gaps of those that left.
  Status Fill(std::span<BatchText* const> entered);
  /// A copy of the state of a text that has a slot.
  Result<std::vector<uint8_t>> Save(const BatchText& text) const {
    return samplers_.Save(text.slot);
  }
  /// Frees a text's slot, if it has one.
  void Leave(BatchText& text);
  /// Leave, with the sampler's state kept in the text.
  Status LeaveWithState(BatchText& text);

 private:
  SamplerSlots samplers_;
  std::vector<BatchText*> texts_;
};

}  // namespace marlin
