#include "metal_sim/access_checker.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

namespace metal_sim {
namespace {

const char* Verb(const MemoryAccess& access) {
  if (access.atomic) return "atomic access";
  return access.writes ? "write" : "read";
}

}  // namespace

AccessChecker::AccessChecker(CheckedMemory* memory, const AccessOrder* order, FindingLog* log,
                             Counters* counters, Triple threadgroups_per_grid, bool check,
                             const Launch& launch)
    : memory_(*memory),
      order_(*order),
      log_(*log),
      counters_(*counters),
      threadgroups_per_grid_(threadgroups_per_grid),
      check_(check),
      program_ranges_(launch.program_ranges) {
  for (const auto& [begin, end] : launch.reached_ranges) {
    reached_ranges_.emplace_back(reinterpret_cast<uintptr_t>(begin),
                                 reinterpret_cast<uintptr_t>(end));
  }
  std::sort(reached_ranges_.begin(), reached_ranges_.end());
}

std::string AccessChecker::ThreadText(uint32_t group, uint32_t thread) const {
  const Triple position = PositionIn(threadgroups_per_grid_, group);
  return fmt::format("thread {} of threadgroup ({},{},{})", thread, position.x, position.y,
                     position.z);
}

CurrentAccess AccessChecker::Current(const Thread& thread, const MemoryAccess& access,
                                     MemoryKind kind) const {
  const uint32_t first_epoch =
      kind == MemoryKind::kDevice ? order_.epochs.first_of_device() : thread.group->first_epoch;
  CurrentAccess now{thread.stamps[static_cast<size_t>(kind)], first_epoch, thread.group->index,
                    kind};
  now.record.site = LowHalf(access.site);
  now.record.atomic = access.atomic ? 1 : 0;
  return now;
}

bool AccessChecker::CheckNoDevice(const Thread& thread, const MemoryAccess& access) {
  if (memory_.threadgroups.Contains(access.address)) return CheckThreadgroup(thread, access);
  return CheckOther(thread, access);
}

bool AccessChecker::CheckShared(const Thread& thread, const MemoryAccess& access) {
  if (memory_.device.Contains(access.address)) return CheckDevice(thread, access);
  if (memory_.threadgroups.Contains(access.address)) return CheckThreadgroup(thread, access);
  DeviceBuffer* const piece = memory_.addressed.Holding(access.address);
  return piece == nullptr || CheckAddressed(thread, access, *piece);
}

AccessChecker::Place AccessChecker::PlaceIn(const DeviceBuffer& buffer,
                                            const MemoryAccess& access) {
  const auto offset = static_cast<int64_t>(access.address - buffer.begin());
  return {"device", buffer.counters.name, buffer.bytes, offset};
}

bool AccessChecker::CheckDevice(const Thread& thread, const MemoryAccess& access) {
  DeviceBuffer& buffer = memory_.device.NearestTo(access.address);
  const size_t offset = access.address - buffer.begin();  // Huge where it is below the buffer.
  if (!buffer.Holds(offset, access.bytes)) {
    ReportOutOfBounds(thread, access, PlaceIn(buffer, access));
    return DeviceMemory::IsOpen(buffer, access.address, access.bytes);
  }
  CheckInside(thread, access, buffer);
  return true;
}

bool AccessChecker::CheckAddressed(const Thread& thread, const MemoryAccess& access,
                                   DeviceBuffer& piece) {
  if (!piece.Holds(access.address - piece.begin(), access.bytes)) {
    ReportOutOfBounds(thread, access, PlaceIn(piece, access));
    return false;
  }
  counters_.addressed_bytes_read += access.reads ? static_cast<int64_t>(access.bytes) : 0;
  counters_.addressed_bytes_written += access.writes ? static_cast<int64_t>(access.bytes) : 0;
  CheckInside(thread, access, piece);
  return !access.writes || !piece.read_only;
}

void AccessChecker::CheckInside(const Thread& thread, const MemoryAccess& access,
                                DeviceBuffer& buffer) {
  const size_t offset = access.address - buffer.begin();
  buffer.Count(offset, access.bytes, access.reads, access.writes);
  if (access.writes && buffer.read_only &&
      log_.Count(FindingKind::kReadOnlyWrite, access.site, nullptr)) {
    log_.Describe(fmt::format("{}, byte {} of {} (device memory, read-only): written by {}",
                              buffer.counters.name, offset, buffer.bytes,
                              ThreadText(thread.group->index, thread.index)));
  }
  if (buffer.shadow == nullptr) return;
  const CurrentAccess now = Current(thread, access, MemoryKind::kDevice);
  const Conflict conflict = buffer.shadow->Check(
      offset, access.bytes, now, {access.reads, access.writes, buffer.initialised}, order_);
  if (conflict.what != Conflict::What::kNone) {
    ReportConflict(now, access, conflict, PlaceIn(buffer, access));
  }
}

bool AccessChecker::CheckThreadgroup(const Thread& thread, const MemoryAccess& access) {
  ThreadgroupArena& arena = *thread.group->arena;
  const size_t offset = access.address - arena.begin();
  if (offset >= ThreadgroupArena::kBytes) {
    if (log_.Count(FindingKind::kForeignThreadgroupMemory, access.site, nullptr)) {
      log_.Describe(fmt::format("{} of {} bytes of another threadgroup's memory, by {}",
                                Verb(access), access.bytes,
                                ThreadText(thread.group->index, thread.index)));
    }
    return memory_.threadgroups.Contains(access.address + access.bytes - 1);
  }
  const ThreadgroupVariable* variable = arena.VariableAt(offset);
  const bool inside = variable != nullptr && offset - variable->offset <= variable->bytes &&
                      access.bytes <= variable->bytes - (offset - variable->offset);
  if (variable == nullptr) variable = arena.NearestTo(offset);
  const auto place = [&] {
    if (variable == nullptr) return Place{"threadgroup", "(none declared)", 0, 0};
    const auto distance = static_cast<int64_t>(offset) - static_cast<int64_t>(variable->offset);
    return Place{"threadgroup", variable->name, variable->bytes, distance};
  };
  if (!inside) {
    ReportOutOfBounds(thread, access, place());
    return memory_.threadgroups.Contains(access.address + access.bytes - 1);
  }
  const auto length = static_cast<int64_t>(access.bytes);
  if (access.reads) counters_.threadgroup_bytes_read += length;
  if (access.writes) counters_.threadgroup_bytes_written += length;
  if (!check_) return true;
  const CurrentAccess now = Current(thread, access, MemoryKind::kThreadgroup);
  const Conflict conflict = arena.shadow().Check(
      offset, access.bytes, now, {access.reads, access.writes, /*initialised=*/false}, order_);
  if (conflict.what != Conflict::What::kNone) ReportConflict(now, access, conflict, place());
  return true;
}

bool AccessChecker::CheckOther(const Thread& thread, const MemoryAccess& access) {
  DeviceBuffer* const piece = memory_.addressed.Holding(access.address);
  if (piece != nullptr) return CheckAddressed(thread, access, *piece);
  if (InProgram(access)) {
    if (!access.writes) return true;
    ReportWild(thread, access, "the kernels' own code and constants");
    return false;
  }
  if (InReached(access)) {
    counters_.reached_bytes_read += access.reads ? static_cast<int64_t>(access.bytes) : 0;
    if (!access.writes) return true;
    ReportWild(thread, access, "memory reached through an address, which is read-only");
    return false;
  }
  if (memory_.stacks.Contains(access.address)) {
    const uintptr_t from_bottom = access.address - thread.stack_bottom;
    const bool overflow = from_bottom + MappedMemory::WholePages(1) < MappedMemory::WholePages(1);
    ReportWild(thread, access,
               overflow ? fmt::format("memory below the thread's stack of {} bytes",
                                      memory_.stacks.usable_bytes())
                        : "another thread's private memory");
    return false;
  }
  ReportWild(thread, access,
             fmt::format("address {:#x}, which belongs to no buffer", access.address));
  return false;
}

bool AccessChecker::InProgram(const MemoryAccess& access) const {
  for (const auto& [begin, end] : program_ranges_) {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const size_t length = reinterpret_cast<uintptr_t>(end) - first;
    const size_t offset = access.address - first;
    if (offset <= length && access.bytes <= length - offset) return true;
  }
  return false;
}

bool AccessChecker::InReached(const MemoryAccess& access) const {
  // The last range that begins at the address or before it.
  const std::pair<uintptr_t, uintptr_t> last_at(access.address,
                                                std::numeric_limits<uintptr_t>::max());
  const auto after = std::upper_bound(reached_ranges_.begin(), reached_ranges_.end(), last_at);
  if (after == reached_ranges_.begin()) return false;
  const uintptr_t end = std::prev(after)->second;
  return access.address < end && access.bytes <= end - access.address;
}

void AccessChecker::ReportOutOfBounds(const Thread& thread, const MemoryAccess& access,
                                      const Place& place) {
  if (!log_.Count(FindingKind::kOutOfBounds, access.site, nullptr)) return;
  log_.Describe(fmt::format("{}, byte {} of {} ({} memory): {} of {} bytes by {}", place.name,
                            place.offset, place.bytes, place.memory, Verb(access), access.bytes,
                            ThreadText(thread.group->index, thread.index)));
}

void AccessChecker::ReportWild(const Thread& thread, const MemoryAccess& access,
                               const std::string& what) {
  if (!log_.Count(FindingKind::kWildAccess, access.site, nullptr)) return;
  log_.Describe(fmt::format("{} of {} bytes of {}, by {}: the launch ends here", Verb(access),
                            access.bytes, what, ThreadText(thread.group->index, thread.index)));
}

void AccessChecker::ReportConflict(const CurrentAccess& now, const MemoryAccess& access,
                                   const Conflict& conflict, const Place& place) {
  const size_t byte = static_cast<size_t>(place.offset) + conflict.byte;
  const std::string where =
      fmt::format("{}, byte {} of {} ({} memory)", place.name, byte, place.bytes, place.memory);
  const std::string who = ThreadText(now.group, now.record.thread);
  if (conflict.what == Conflict::What::kUninitialised) {
    if (!log_.Count(FindingKind::kUninitialisedRead, access.site, nullptr)) return;
    log_.Describe(fmt::format("{}: read by {} before anybody wrote it", where, who));
    return;
  }
  const AccessRecord& other = conflict.other;
  const void* other_site = SiteNear(other.site, access.site);
  if (!log_.Count(FindingKind::kRace, access.site, other_site)) return;
  const uint32_t other_group = order_.epochs.GroupOf(other, now.kind, now.group);
  const char* reason = other_group != now.group ? "nothing orders threadgroups within a launch"
                                                : "no barrier for this memory between them";
  log_.Describe(fmt::format(
      "{}: {}{} by {}, then {}{} by {}; {}", where, other.atomic ? "atomically " : "",
      conflict.other_wrote ? "written" : "read", ThreadText(other_group, other.thread),
      access.atomic ? "atomically " : "", access.writes ? "written" : "read", who, reason));
}

}  // namespace metal_sim
