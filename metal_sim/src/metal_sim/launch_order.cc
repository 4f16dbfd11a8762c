#include "metal_sim/launch_order.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace metal_sim {
namespace {

struct Shared {
  uintptr_t address;
  bool first_wrote;
  bool second_wrote;
};

/// The first byte that both used and one of them wrote.
std::optional<Shared> FindShared(const ObservedAccess& first, const ObservedAccess& second) {
  const auto first_begin = reinterpret_cast<uintptr_t>(first.data);
  const auto second_begin = reinterpret_cast<uintptr_t>(second.data);
  const uintptr_t begin = std::max(first_begin, second_begin);
  const uintptr_t end = std::min(first_begin + first.bytes, second_begin + second.bytes);
  for (uintptr_t at = begin; at < end; at += ByteSet::kWord) {
    const uint64_t first_wrote = first.written.From(at - first_begin);
    const uint64_t second_wrote = second.written.From(at - second_begin);
    if ((first_wrote | second_wrote) == 0) continue;
    const uint64_t both = (first_wrote | first.read.From(at - first_begin)) &
                          (second_wrote | second.read.From(at - second_begin));
    const uint64_t shared = both & (first_wrote | second_wrote);
    if (shared == 0) continue;
    const int byte = std::countr_zero(shared);
    return Shared{at + static_cast<uintptr_t>(byte), (first_wrote >> byte & 1) != 0,
                  (second_wrote >> byte & 1) != 0};
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> LaunchOrder::Add(std::string kernel,
                                            std::vector<ObservedAccess> observed) {
  std::optional<std::string> found;
  for (const Ran& earlier : launches_) {
    for (const ObservedAccess& first : earlier.observed) {
      for (const ObservedAccess& second : observed) {
        const std::optional<Shared> shared = found ? std::nullopt : FindShared(first, second);
        if (!shared) continue;
        const uintptr_t offset = shared->address - reinterpret_cast<uintptr_t>(second.data);
        found = fmt::format(
            "{} {} byte {} of {}, which {} {} ({}), and no barrier is between these launches",
            kernel, shared->second_wrote ? "writes" : "reads", offset, second.name, earlier.kernel,
            shared->first_wrote ? "writes" : "reads", first.name);
      }
    }
  }
  launches_.push_back({std::move(kernel), std::move(observed)});
  if (launches_.size() > kMostLaunches) launches_.pop_front();
  return found;
}

}  // namespace metal_sim
