#include "base/memory_size.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "base/checked.h"
#include "base/host/control_groups.h"

#ifdef __APPLE__
#include <mach/mach.h>
#endif

namespace marlin {
namespace {

#ifdef __APPLE__
std::optional<int64_t> MachineFree(const std::string& /*root*/) {
  vm_statistics64_data_t pages = {};
  mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
  if (host_statistics64(mach_host_self(), HOST_VM_INFO64, reinterpret_cast<host_info64_t>(&pages),
                        &count) != KERN_SUCCESS) {
    return std::nullopt;
  }
  const Checked free = Checked(pages.free_count) + Checked(pages.inactive_count);
  return (free * Checked(sysconf(_SC_PAGESIZE))).Take();
}
#else
/// MemAvailable, which Linux estimates.
std::optional<int64_t> MachineFree(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string name;
  std::string unit;
  for (int64_t value = 0; file >> name >> value;) {
    if (name == "MemAvailable:") return (Checked(value) * Checked(1024)).Take();
    std::getline(file, unit);
  }
  return std::nullopt;
}
#endif

}  // namespace

int64_t MemoryBytes() {
  const Checked installed = Checked(sysconf(_SC_PHYS_PAGES)) * Checked(sysconf(_SC_PAGESIZE));
  const int64_t bytes = installed.Take().value_or(INT64_MAX);
  return std::min(bytes, ReadGroupLimits().memory.value_or(INT64_MAX));
}

std::optional<int64_t> FreeMemoryBytes(const std::string& root) {
  const std::optional<int64_t> free = MachineFree(root);
  const std::optional<int64_t> left = ReadGroupLimits(root).left;
  return free && left ? std::min(free, left) : free ? free : left;
}

}  // namespace marlin
