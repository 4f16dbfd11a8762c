#include "backends/metal/runtime/launch_hazards.h"

namespace marlin::metal {

std::vector<LaunchHazards::Range> LaunchHazards::RangesOf(const KernelLaunch& launch) {
  std::vector<Range> ranges;
  ranges.reserve(launch.buffers.size() + launch.addressed.size());
  const auto add = [&](const void* data, int64_t bytes, bool written) {
    if (data == nullptr || bytes <= 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(data);
    ranges.push_back({begin, begin + static_cast<uintptr_t>(bytes), written, launch.function});
  };
  for (const KernelBuffer& buffer : launch.buffers) add(buffer.data, buffer.bytes, buffer.written);
  for (const AddressedRange& range : launch.addressed) add(range.data, range.bytes, range.written);
  return ranges;
}

std::string_view LaunchHazards::Conflict(const KernelLaunch& launch) const {
  const std::vector<Range> wanted = RangesOf(launch);
  for (const Range& earlier : ranges_) {
    for (const Range& range : wanted) {
      const bool overlap = earlier.begin < range.end && range.begin < earlier.end;
      if (overlap && (earlier.written || range.written)) return earlier.function;
    }
  }
  return {};
}

void LaunchHazards::Add(const KernelLaunch& launch) {
  const std::vector<Range> added = RangesOf(launch);
  ranges_.insert(ranges_.end(), added.begin(), added.end());
}

}  // namespace marlin::metal
