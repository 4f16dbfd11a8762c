#include "plan/moe/expert_slots.h"

#include <fmt/core.h>

#include <algorithm>

namespace marlin {

Status WrongExpert(SelectionPlace place, int32_t id, int64_t experts) {
  return Status(Code::kInvalidArgument,
                fmt::format("ids: token {}, selection {}: {} is not in 0..{}", place.token,
                            place.selection, id, experts - 1));
}

Status SortByExpert(const Selections& selections, const LayerExperts& layer,
                    const ExpertSlots& slots) {
  const auto present = [&](int32_t id) { return layer.experts[static_cast<size_t>(id)].present(); };
  const int64_t count = selections.tokens * selections.top_k;
  int32_t* const begin = slots.begin;
  std::fill(begin, begin + slots.experts + 2, 0);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = selections.ids[i];
    if (id < 0 || id >= slots.experts) {
      return WrongExpert({selections.first + i / selections.top_k, i % selections.top_k}, id,
                         slots.experts);
    }
    if (present(id)) ++begin[id + 1];
  }
  for (int64_t e = 0; e < slots.experts; ++e) begin[e + 1] += begin[e];
  // Counting upwards moves begin[e] to where begin[e + 1] was.
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = selections.ids[i];
    const int32_t slot = present(id) ? begin[id]++ : -1;
    slots.slot_of[i] = slot;
    if (slot < 0) continue;
    slots.token[slot] = static_cast<int32_t>(i / selections.top_k);
    slots.weight[slot] = selections.weights[i];
  }
  for (int64_t e = slots.experts; e > 0; --e) begin[e] = begin[e - 1];
  begin[0] = 0;
  const int32_t routed = begin[slots.experts];
  begin[slots.experts + 1] = routed;
  if (!layer.shared.present()) return {};
  for (int64_t t = 0; t < selections.tokens; ++t) {
    slots.token[routed + t] = static_cast<int32_t>(t);
  }
  begin[slots.experts + 1] += static_cast<int32_t>(selections.tokens);
  return {};
}

}  // namespace marlin
