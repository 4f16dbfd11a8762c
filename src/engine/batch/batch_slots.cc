#include "engine/batch/batch_slots.h"

#include <algorithm>

#include "base/macros.h"

namespace marlin {

std::vector<BatchText*> BatchSlots::Enter(std::span<BatchText* const> running) {
  std::vector<BatchText*> entered;
  for (BatchText* const text : running) {
    if (!text->samples() || text->slot >= 0) continue;
    const auto hole = std::find(texts_.begin(), texts_.end(), nullptr);
    text->slot = hole - texts_.begin();
    if (hole == texts_.end()) {
      texts_.push_back(text);
    } else {
      *hole = text;
    }
    entered.push_back(text);
  }
  return entered;
}

Status BatchSlots::Fill(std::span<BatchText* const> entered) {
  std::vector<SamplerSlots::Reset> resets;
  for (BatchText* const text : entered) {
    if (text->sampler.empty()) {
      resets.push_back({text->slot, &text->options->sampling, text->prompt});
    } else {
      MARLIN_RETURN_IF_ERROR(samplers_.Restore(text->slot, text->sampler));
    }
  }
  MARLIN_RETURN_IF_ERROR(samplers_.ResetAll(resets));
  for (size_t i = 0; i < texts_.size(); ++i) {
    while (!texts_.empty() && texts_.back() == nullptr) texts_.pop_back();
    if (i >= texts_.size() || texts_[i] != nullptr) continue;
    BatchText& last = *texts_.back();
    MARLIN_RETURN_IF_ERROR(samplers_.Move(last.slot, static_cast<int64_t>(i)));
    last.slot = static_cast<int64_t>(i);
    texts_[i] = &last;
    texts_.pop_back();
  }
  return {};
}

void BatchSlots::Leave(BatchText& text) {
  if (text.slot >= 0) texts_[static_cast<size_t>(text.slot)] = nullptr;
  text.slot = -1;
}

Status BatchSlots::LeaveWithState(BatchText& text) {
  if (text.slot < 0) return {};
  MARLIN_ASSIGN_OR_RETURN(text.sampler, Save(text));
  Leave(text);
  return {};
}

}  // namespace marlin
