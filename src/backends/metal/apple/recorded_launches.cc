#include "backends/metal/apple/recorded_launches.h"

#include <algorithm>
#include <cstring>

#include "backends/metal/runtime/launch_hazards.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// The offsets of constant memory in a buffer are multiples of this on every GPU.
constexpr int64_t kConstantAlignment = 256;

template <typename T>
void KeepOneOfEach(std::vector<std::shared_ptr<T>>* all) {
  std::sort(all->begin(), all->end());
  all->erase(std::unique(all->begin(), all->end()), all->end());
}

}  // namespace

Result<RecordedLaunches> RecordedLaunches::Make(const std::vector<CheckedLaunches>& calls,
                                                const LaunchBinder& binder, DeviceMemory& memory) {
  RecordedLaunches recorded;
  const auto used = std::make_shared<UsedMemory>();
  MARLIN_RETURN_IF_ERROR(recorded.BindAll(calls, binder, used.get()));
  MARLIN_RETURN_IF_ERROR(recorded.MoveParameters(memory, used.get()));
  KeepOneOfEach(&used->parts);
  KeepOneOfEach(&used->reached);
  recorded.used_ = used;
  return recorded;
}

Status RecordedLaunches::BindAll(const std::vector<CheckedLaunches>& calls,
                                 const LaunchBinder& binder, UsedMemory* used) {
  LaunchHazards hazards;
  for (const CheckedLaunches& call : calls) {
    for (const KernelLaunch& launch : call.launches) {
      MARLIN_ASSIGN_OR_RETURN(BoundLaunch bound, binder.Bind(launch, {}, used));
      bound.after_barrier = !hazards.Conflict(launch).empty();
      if (bound.after_barrier) hazards.Clear();
      hazards.Add(launch);
      launches_.push_back(std::move(bound));
    }
    if (call.check) checks_.push_back({launches_.size(), call.check});
  }
  return {};
}

/// Copies the parameters, which are still the launches', and makes them arguments.
Status RecordedLaunches::MoveParameters(DeviceMemory& memory, UsedMemory* used) {
  int64_t bytes = 0;
  const auto size_of = [](const BoundLaunch& launch) {
    return RoundUp(static_cast<int64_t>(launch.parameters.size()), kConstantAlignment);
  };
  for (const BoundLaunch& launch : launches_) bytes += size_of(launch);
  MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<const BufferPart> part, memory.Take(bytes));
  int64_t offset = 0;
  for (BoundLaunch& launch : launches_) {
    std::memcpy(part->data() + offset, launch.parameters.data(), launch.parameters.size());
    launch.arguments.push_back({part->buffer(), part->offset() + static_cast<NS::UInteger>(offset),
                                MARLIN_BUFFER_PARAMETERS});
    offset += size_of(launch);
    launch.parameters = {};
  }
  used->parts.push_back(part);
  return {};
}

Status RecordedLaunches::AppendTo(OpenCommands* open) const {
  auto check = checks_.begin();
  for (size_t i = 0; i < launches_.size(); ++i) {
    open->MakeRoom(launches_[i].operations, true);
    open->Keep(used_);
    MARLIN_RETURN_IF_ERROR(open->AppendRecorded(launches_[i], i == 0));
    for (; check != checks_.end() && check->launches <= i + 1; ++check) {
      open->AddCheck(check->check);
    }
  }
  return {};
}

}  // namespace marlin::metal
