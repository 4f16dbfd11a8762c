// Checks one memory access of one thread: finds the memory it belongs to, checks its bounds, runs
// the race detector, counts and reports it. Must not know how threads are scheduled.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "metal_sim/addressed_memory.h"
#include "metal_sim/device_memory.h"
#include "metal_sim/finding_log.h"
#include "metal_sim/shadow_cell.h"
#include "metal_sim/threadgroup_memory.h"
#include "metal_sim/threads.h"

namespace metal_sim {

/// An access that is about to happen.
struct MemoryAccess {
  uintptr_t address = 0;
  size_t bytes = 0;
  bool reads = false;
  bool writes = false;
  bool atomic = false;
  const void* site = nullptr;
};

/// The memory of a launch. A Simulation uses it and leaves it to the next one.
struct CheckedMemory {
  DeviceMemory device;
  ThreadgroupMemory threadgroups;
  AddressedMemory addressed;
  FiberStacks stacks;
  LastEpochs epochs;  ///< The last epochs of earlier launches.
};

class AccessChecker {
 public:
  /// The ranges are `launch`'s. Everything must outlive the checker.
  AccessChecker(CheckedMemory* memory, const AccessOrder* order, FindingLog* log,
                Counters* counters, Triple threadgroups_per_grid, bool check, const Launch& launch);

  /// Checks an access outside of the thread's own stack. Returns whether it can be let happen;
  /// false: the memory is not there.
  bool Check(const Thread& thread, const MemoryAccess& access) {
    if (!memory_.device.Contains(access.address)) return CheckNoDevice(thread, access);
    DeviceBuffer& buffer = memory_.device.NearestTo(access.address);
    const size_t offset = access.address - buffer.begin();  // Huge where it is below the buffer.
    // Most accesses read buffers that are never written: they only count.
    const bool decided =
        buffer.shadow == nullptr && !access.writes && buffer.Holds(offset, access.bytes);
    if (!decided) return CheckDevice(thread, access);
    buffer.Count(offset, access.bytes, /*reads=*/true, /*writes=*/false);
    return true;
  }

  /// As Check, for code that runs on behalf of several lanes. It may use their stacks, so memory
  /// that is neither a buffer nor threadgroup memory passes.
  bool CheckShared(const Thread& thread, const MemoryAccess& access);

  /// "thread 5 of threadgroup (0,0,0)"
  std::string ThreadText(uint32_t group, uint32_t thread) const;

 private:
  bool CheckDevice(const Thread& thread, const MemoryAccess& access);
  bool CheckAddressed(const Thread& thread, const MemoryAccess& access, DeviceBuffer& piece);
  /// An access that lies in the buffer.
  void CheckInside(const Thread& thread, const MemoryAccess& access, DeviceBuffer& buffer);
  bool CheckNoDevice(const Thread& thread, const MemoryAccess& access);
  bool CheckThreadgroup(const Thread& thread, const MemoryAccess& access);
  bool CheckOther(const Thread& thread, const MemoryAccess& access);

  /// A buffer or variable as findings name it, and how far into it the access begins.
  struct Place {
    const char* memory;
    std::string name;
    size_t bytes;
    int64_t offset;
  };
  static Place PlaceIn(const DeviceBuffer& buffer, const MemoryAccess& access);
  void ReportOutOfBounds(const Thread& thread, const MemoryAccess& access, const Place& place);
  void ReportConflict(const CurrentAccess& now, const MemoryAccess& access,
                      const Conflict& conflict, const Place& place);
  void ReportWild(const Thread& thread, const MemoryAccess& access, const std::string& what);
  CurrentAccess Current(const Thread& thread, const MemoryAccess& access, MemoryKind kind) const;
  bool InProgram(const MemoryAccess& access) const;
  bool InReached(const MemoryAccess& access) const;

  CheckedMemory& memory_;
  const AccessOrder& order_;
  FindingLog& log_;
  Counters& counters_;
  Triple threadgroups_per_grid_;
  bool check_;
  const std::vector<std::pair<const void*, const void*>>& program_ranges_;
  std::vector<std::pair<uintptr_t, uintptr_t>> reached_ranges_;  ///< Sorted.
};

}  // namespace metal_sim
