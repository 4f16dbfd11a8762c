#include "backends/cuda/ticket_bank.h"

#include "base/macros.h"

namespace marlin::cuda {

Result<std::unique_ptr<TicketBank>> TicketBank::Make(const std::shared_ptr<DeviceHandle>& device) {
  constexpr int64_t kBytes = int64_t{kWorkspaces} * kTickets * sizeof(uint32_t);
  const DeviceScope scope(device->index);
  MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device, kBytes));
  MARLIN_RETURN_IF_ERROR(device->errors.Check(cudaMemset(memory.data(), 0, kBytes), "cudaMemset"));
  // Streams that do not wait for the default one must find zeros too.
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
  return std::unique_ptr<TicketBank>(new TicketBank(std::move(memory)));
}

uint32_t* TicketBank::Of(const void* workspace, int tickets) {
  if (tickets > kTickets) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = places_.find(workspace);
  int place = static_cast<int>(places_.size());
  if (found != places_.end()) {
    place = found->second;
  } else if (place < kWorkspaces) {
    places_.emplace(workspace, place);
  } else {
    return nullptr;
  }
  return reinterpret_cast<uint32_t*>(memory_.data()) + int64_t{place} * kTickets;
}

}  // namespace marlin::cuda
