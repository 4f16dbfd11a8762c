#include "backends/metal/apple/gpu_cores.h"

#include <CoreFoundation/CoreFoundation.h>
#include <IOKit/IOKitLib.h>

#include <array>
#include <utility>

namespace marlin::metal {
namespace {

/// The "gpu-core-count" property of the first service that matches; 0: none. Consumes `matching`.
int CoresOfService(CFMutableDictionaryRef matching) {
  if (matching == nullptr) return 0;
  const io_service_t service = IOServiceGetMatchingService(MACH_PORT_NULL, matching);
  if (service == IO_OBJECT_NULL) return 0;
  const CFStringRef key =
      CFStringCreateWithCString(kCFAllocatorDefault, "gpu-core-count", kCFStringEncodingUTF8);
  const CFTypeRef value = IORegistryEntryCreateCFProperty(service, key, kCFAllocatorDefault, 0);
  int cores = 0;
  if (value != nullptr && CFGetTypeID(value) == CFNumberGetTypeID()) {
    CFNumberGetValue(static_cast<CFNumberRef>(value), kCFNumberIntType, &cores);
  }
  if (value != nullptr) CFRelease(value);
  CFRelease(key);
  IOObjectRelease(service);
  return cores;
}

/// The highest GPU core count that each chip is sold with, from Apple's specifications.
constexpr std::pair<std::string_view, int> kMostCores[] = {
    {"Apple M1", 8},  {"Apple M1 Pro", 16}, {"Apple M1 Max", 32}, {"Apple M1 Ultra", 64},
    {"Apple M2", 10}, {"Apple M2 Pro", 19}, {"Apple M2 Max", 38}, {"Apple M2 Ultra", 76},
    {"Apple M3", 10}, {"Apple M3 Pro", 18}, {"Apple M3 Max", 40}, {"Apple M3 Ultra", 80},
    {"Apple M4", 10}, {"Apple M4 Pro", 20}, {"Apple M4 Max", 40}, {"Apple M5", 10},
};
constexpr int kAssumedCores = 8;

}  // namespace

CoreCount CountCores(uint64_t registry_id, std::string_view name) {
  int cores = CoresOfService(IORegistryEntryIDMatching(registry_id));
  if (cores <= 0) cores = CoresOfService(IOServiceMatching("AGXAccelerator"));
  if (cores > 0) return {cores, "counted"};
  for (const auto& [chip, most] : kMostCores) {
    if (chip == name) return {most, "by name"};
  }
  return {kAssumedCores, "assumed"};
}

}  // namespace marlin::metal
