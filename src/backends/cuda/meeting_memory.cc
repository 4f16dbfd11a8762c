#include "backends/cuda/meeting_memory.h"

#include <algorithm>
#include <bit>

#include "base/macros.h"

namespace marlin::cuda {

Result<std::unique_ptr<MeetingMemory>> MeetingMemory::Make(
    const std::shared_ptr<DeviceHandle>& device) {
  const DeviceScope scope(device->index);
  MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device, kBytes));
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaMemset(memory.data(), 0xff, kBytes), "cudaMemset"));
  // Streams that do not wait for the default one must find ones too.
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
  return std::unique_ptr<MeetingMemory>(new MeetingMemory(std::move(memory)));
}

uint32_t* MeetingMemory::Of(const void* workspace, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = places_.find(workspace);
  Place place = found == places_.end() ? Place() : found->second;
  if (place.bytes < bytes) {
    // Powers of two, so that a workspace which wants ever more leaves little behind.
    const int64_t wanted = std::max<int64_t>(
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))), kAlignment);
    if (wanted > kBytes - lent_) return nullptr;
    place = {lent_, wanted};
    lent_ += wanted;
    places_[workspace] = place;
  }
  return reinterpret_cast<uint32_t*>(memory_.data() + place.offset);
}

}  // namespace marlin::cuda
