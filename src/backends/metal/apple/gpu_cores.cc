#include "backends/metal/apple/gpu_cores.h"

#include <CoreFoundation/CoreFoundation.h>
#include <IOKit/IOKitLib.h>

#include "backends/metal/runtime/core_names.h"

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

constexpr int kAssumedCores = 8;

}  // namespace

CoreCount CountCores(uint64_t registry_id, std::string_view name) {
  int cores = CoresOfService(IORegistryEntryIDMatching(registry_id));
  if (cores <= 0) cores = CoresOfService(IOServiceMatching("AGXAccelerator"));
  if (cores > 0) return {cores, "counted"};
  if (const int most = MostCoresOf(name); most > 0) return {most, "by name"};
  return {kAssumedCores, "assumed"};
}

}  // namespace marlin::metal
