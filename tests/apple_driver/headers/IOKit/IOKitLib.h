// The part of IOKit that the driver uses; implemented in io_registry.cc.
#pragma once

#include <CoreFoundation/CoreFoundation.h>
#include <mach/mach.h>

using io_object_t = unsigned;
using io_service_t = io_object_t;
inline constexpr io_object_t IO_OBJECT_NULL = 0;

extern "C" {
CFMutableDictionaryRef IORegistryEntryIDMatching(uint64_t id);
CFMutableDictionaryRef IOServiceMatching(const char* name);
io_service_t IOServiceGetMatchingService(unsigned port, CFMutableDictionaryRef matching);
CFTypeRef IORegistryEntryCreateCFProperty(io_service_t entry, CFStringRef key,
                                          CFAllocatorRef allocator, uint32_t options);
int IOObjectRelease(io_object_t object);
}
