#include "engine/speculation/draft_samplers.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/macros.h"
#include "marlin/sampling.h"

namespace marlin {

Result<std::shared_ptr<DraftSamplers>> DraftSamplers::Make(const Model& draft) {
  MARLIN_ASSIGN_OR_RETURN(SamplerSlots slots,
                          SamplerSlots::Make(draft.device(), draft.info().vocab_size, 1));
  const SamplingOptions greedy;
  const int32_t any = 0;
  const SamplerSlots::Reset reset{0, &greedy, {&any, 1}};
  MARLIN_RETURN_IF_ERROR(slots.ResetAll({&reset, 1}));
  MARLIN_RETURN_IF_ERROR(draft.device().Synchronize());
  MARLIN_ASSIGN_OR_RETURN(std::vector<uint8_t> state, slots.Save(0));
  return std::shared_ptr<DraftSamplers>(
      new DraftSamplers(draft, std::move(slots), std::move(state)));
}

Result<MutableTensorView> DraftSamplers::Begin(std::span<const std::span<const uint8_t>> texts) {
  const auto wanted = std::ssize(texts);
  if (wanted > tried_) {
    tried_ = static_cast<int64_t>(std::bit_ceil(texts.size()));
    Result<SamplerSlots> slots = SamplerSlots::Make(device_, vocab_, tried_);
    if (!slots.ok() && slots.status().code() != Code::kOutOfMemory) return slots.status();
    if (slots.ok() && slots->count() > slots_.count()) {
      slots_ = *std::move(slots);
      is_greedy_.assign(static_cast<size_t>(slots_.count()), false);
    }
  }
  const int64_t used = std::min(wanted, slots_.count());
  for (int64_t slot = 0; slot < used; ++slot) {
    const auto at = static_cast<size_t>(slot);
    const bool copies = texts[at].size() == greedy_.size();
    if (copies || !is_greedy_[at]) {
      MARLIN_RETURN_IF_ERROR(slots_.Restore(slot, copies ? texts[at] : std::span(greedy_)));
    }
    is_greedy_[at] = !copies;
  }
  return slots_.First(used);
}

}  // namespace marlin
