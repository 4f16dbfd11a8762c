#include "backends/metal/runtime/simulated_order.h"

#include <fmt/core.h>

#include <optional>
#include <string>

#include "base/macros.h"

namespace marlin::metal {
namespace {

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a);
  const auto second = reinterpret_cast<uintptr_t>(b);
  return first < second + static_cast<uintptr_t>(b_bytes) &&
         second < first + static_cast<uintptr_t>(a_bytes);
}

}  // namespace

uint64_t SimulatedOrder::Begin(const KernelLaunch& launch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!hazards_.Conflict(launch).empty()) {
    hazards_.Clear();
    if (drops_ == nullptr || !drops_()) ++number_;
  }
  hazards_.Add(launch);
  return number_;
}

Status SimulatedOrder::End(uint64_t number, const KernelLaunch& launch,
                           std::vector<metal_sim::ObservedAccess> observed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (number < ended_) return Status();  // Another thread's launch passed a barrier meanwhile.
  if (number > ended_) {
    order_.Barrier();
    reached_.clear();
    ended_ = number;
  }
  if (launch.reached != nullptr) reached_.push_back({launch.reached, launch.function});
  MARLIN_RETURN_IF_ERROR(CheckWeights(launch));
  const std::optional<std::string> missing =
      order_.Add(std::string(launch.function), std::move(observed));
  if (!missing) return Status();
  return Status(Code::kInternal, fmt::format("missing barrier: {}", *missing));
}

void SimulatedOrder::Barrier() {
  const std::lock_guard<std::mutex> lock(mutex_);
  hazards_.Clear();
  ++number_;
}

Status SimulatedOrder::CheckWeights(const KernelLaunch& launch) const {
  for (const Reached& reached : reached_) {
    const auto memory = reached.memory.lock();
    if (memory != nullptr) {
      MARLIN_RETURN_IF_ERROR(CheckWeights(launch, *memory, reached.function));
    }
  }
  return Status();
}

Status SimulatedOrder::CheckWeights(const KernelLaunch& writer, const ReachedMemory& memory,
                                    std::string_view reader) {
  const auto check = [&](const void* data, int64_t bytes, bool written) {
    if (!written) return Status();
    for (const MemoryRange& range : memory.ranges) {
      if (!Overlap(data, bytes, range.data, range.bytes)) continue;
      return Status(Code::kInternal,
                    fmt::format("{} writes weights that {} reaches through addresses, which no "
                                "barrier orders",
                                writer.function, reader));
    }
    return Status();
  };
  for (const KernelBuffer& buffer : writer.buffers) {
    MARLIN_RETURN_IF_ERROR(check(buffer.data, buffer.bytes, buffer.written));
  }
  for (const AddressedRange& range : writer.addressed) {
    MARLIN_RETURN_IF_ERROR(check(range.data, range.bytes, range.written));
  }
  return Status();
}

}  // namespace marlin::metal
