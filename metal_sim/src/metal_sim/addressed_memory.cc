#include "metal_sim/addressed_memory.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace metal_sim {
namespace {

const std::byte* BytesAt(const void* address) { return static_cast<const std::byte*>(address); }

}  // namespace

std::vector<AddressedRange> CutRanges(const std::vector<AddressedRange>& ranges) {
  const std::less<const void*> before;
  std::vector<const void*> ends;
  for (const AddressedRange& range : ranges) {
    ends.push_back(range.begin);
    ends.push_back(range.end);
  }
  std::sort(ends.begin(), ends.end(), before);
  std::vector<AddressedRange> pieces;
  for (size_t i = 0; i + 1 < ends.size(); ++i) {
    AddressedRange piece = {ends[i], ends[i + 1], false};
    if (piece.begin == piece.end) continue;
    bool covered = false;
    for (const AddressedRange& range : ranges) {
      const bool holds = !before(piece.begin, range.begin) && !before(range.end, piece.end);
      covered = covered || holds;
      piece.written = piece.written || (holds && range.written);
    }
    if (!covered) continue;
    const bool joins = !pieces.empty() && pieces.back().end == piece.begin &&
                       pieces.back().written == piece.written;
    if (joins) {
      pieces.back().end = piece.end;
    } else {
      pieces.push_back(piece);
    }
  }
  return pieces;
}

Status AddressedMemory::Place(const std::vector<AddressedRange>& ranges, bool check) {
  pieces_.clear();
  shadows_.clear();
  for (const AddressedRange& range : CutRanges(ranges)) {
    const auto bytes = static_cast<size_t>(BytesAt(range.end) - BytesAt(range.begin));
    BufferCounters counters;
    counters.name = "memory reached through an address";
    DeviceBuffer piece{.data = const_cast<std::byte*>(BytesAt(range.begin)),
                       .origin = range.begin,
                       .bytes = bytes,
                       .index = -1,
                       .read_only = !range.written,
                       .initialised = true,
                       .shadow = nullptr,
                       .read = ByteSet(bytes),
                       .written = ByteSet(bytes),
                       .counters = std::move(counters)};
    if (check && range.written) {
      METAL_SIM_ASSIGN_OR_RETURN(ShadowMemory shadow, ShadowMemory::Allocate(bytes));
      piece.shadow = &shadows_.emplace_back(std::move(shadow));
    }
    pieces_.push_back(std::move(piece));
  }
  return {};
}

}  // namespace metal_sim
