// The part of CoreFoundation that metal-cpp and the driver use; implemented in io_registry.cc.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

using CFTimeInterval = double;
using CFTypeRef = const void*;
using CFStringRef = const struct __CFString*;
using CFNumberRef = const struct __CFNumber*;
using CFMutableDictionaryRef = struct __CFDictionary*;
using CFAllocatorRef = const struct __CFAllocator*;

inline constexpr CFAllocatorRef kCFAllocatorDefault = nullptr;
inline constexpr uint32_t kCFStringEncodingUTF8 = 0x08000100;
inline constexpr long kCFNumberIntType = 9;

extern "C" {
const void* __CFStringMakeConstantString(const char* text);
CFStringRef CFStringCreateWithCString(CFAllocatorRef allocator, const char* text,
                                      uint32_t encoding);
unsigned long CFGetTypeID(CFTypeRef value);
unsigned long CFNumberGetTypeID();
unsigned char CFNumberGetValue(CFNumberRef number, long type, void* value);
void CFRelease(CFTypeRef value);
}
