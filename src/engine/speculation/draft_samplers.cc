#include "engine/speculation/draft_samplers.h"

#include <utility>

#include "base/macros.h"
#include "marlin/sampling.h"

namespace marlin {

Result<std::shared_ptr<DraftSamplers>> DraftSamplers::Make(const Model& draft) {
  MARLIN_ASSIGN_OR_RETURN(SamplerSlots slots,
                          SamplerSlots::Make(draft.device(), draft.info().vocab_size, 2));
  const SamplingOptions greedy;
  const int32_t any = 0;
  const SamplerSlots::Reset reset{0, &greedy, {&any, 1}};
  MARLIN_RETURN_IF_ERROR(slots.ResetAll({&reset, 1}));
  return std::shared_ptr<DraftSamplers>(new DraftSamplers(std::move(slots)));
}

Result<MutableTensorView> DraftSamplers::Begin(std::span<const uint8_t> text) {
  const bool copies = slots_.count() > 1 && std::ssize(text) == slots_.At(0).dim(1);
  if (copies) MARLIN_RETURN_IF_ERROR(slots_.Restore(1, text));
  return slots_.At(copies ? 1 : 0);
}

}  // namespace marlin
