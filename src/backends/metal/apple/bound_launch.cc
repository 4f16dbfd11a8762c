#include "backends/metal/apple/bound_launch.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "backends/metal/apple/launch_observer.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Upper limit of setBytes.
constexpr size_t kMostBytesInline = 4096;

}  // namespace

LaunchObserver& TheLaunchObserver() {
  static LaunchObserver observer = nullptr;
  return observer;
}

bool UsedMemory::Has(const BufferPart* part) const {
  return std::any_of(parts.begin(), parts.end(),
                     [part](const auto& kept) { return kept.get() == part; });
}

Result<BufferPlace> LaunchBinder::PlaceOf(const KernelBuffer& buffer,
                                          const CallerMemory& caller) const {
  const bool empty = buffer.data == nullptr || buffer.bytes == 0;
  // Those that a kernel could write must not overlap others.
  const void* const data = empty ? unread_ + buffer.index * kUnreadBytes : buffer.data;
  MARLIN_ASSIGN_OR_RETURN(BufferPlace place, memory_.Find(data, empty ? 1 : buffer.bytes));
  return place.buffer != nullptr ? std::move(place) : caller.Find(data);
}

Status LaunchBinder::BindAddressed(const KernelLaunch& launch, UsedMemory* used,
                                   BoundLaunch* bound) const {
  for (const AddressedRange& range : launch.addressed) {
    if (range.data == nullptr || range.bytes == 0) continue;
    MARLIN_ASSIGN_OR_RETURN(BufferPlace place, memory_.Find(range.data, range.bytes));
    if (place.buffer == nullptr) {
      return Status(Code::kInvalidArgument,
                    fmt::format("metal: {}: {} bytes that a kernel finds by their address are not "
                                "in an allocation",
                                launch.function, range.bytes));
    }
    if (names_all_ || !place.part->resident()) {
      (range.written ? bound->written : bound->read).push_back(place.buffer);
    }
    used->parts.push_back(std::move(place.part));
  }
  if (launch.reached == nullptr) return {};
  const auto& reached = static_cast<const ReachedBuffers&>(*launch.reached);
  bound->read.insert(bound->read.end(), reached.outside.begin(), reached.outside.end());
  if (used->reached.empty() || used->reached.back() != launch.reached) {
    used->reached.push_back(launch.reached);
  }
  return {};
}

Result<BoundLaunch> LaunchBinder::Bind(const KernelLaunch& launch, const CallerMemory& caller,
                                       UsedMemory* used) const {
  BoundLaunch bound;
  bound.function = launch.function;
  MARLIN_ASSIGN_OR_RETURN(bound.pipeline, kernels_.PipelineOf(launch));
  bound.arguments.reserve(launch.buffers.size() + 1);
  for (const KernelBuffer& buffer : launch.buffers) {
    MARLIN_ASSIGN_OR_RETURN(BufferPlace place, PlaceOf(buffer, caller));
    bound.arguments.push_back(
        {place.buffer, place.offset, static_cast<NS::UInteger>(buffer.index)});
    if (place.part != nullptr) used->parts.push_back(std::move(place.part));
  }
  MARLIN_RETURN_IF_ERROR(BindAddressed(launch, used, &bound));
  bound.parameters = ParameterBytes(launch);
  if (bound.parameters.size() > kMostBytesInline) {
    return Status(Code::kInternal,
                  fmt::format("metal: {}: {} bytes of parameters, Metal takes {}", launch.function,
                              bound.parameters.size(), kMostBytesInline));
  }
  bound.threadgroups = launch.threadgroups;
  bound.threads = launch.threads;
  bound.operations = launch.operations;
  if (TheLaunchObserver() != nullptr) bound.observed = std::make_shared<KernelLaunch>(launch);
  return bound;
}

}  // namespace marlin::metal
