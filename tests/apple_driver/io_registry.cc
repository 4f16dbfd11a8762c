// A fake IOKit device registry with at most one GPU.
#include <IOKit/IOKitLib.h>

#include <cstring>

#include "fake_gpu.h"

namespace {

constexpr int kByNumber = 1;
constexpr int kByClass = 2;

int core_count = 0;

}  // namespace

extern "C" {

CFMutableDictionaryRef IORegistryEntryIDMatching(uint64_t /*id*/) {
  return reinterpret_cast<CFMutableDictionaryRef>(kByNumber);
}
CFMutableDictionaryRef IOServiceMatching(const char* name) {
  return std::strcmp(name, "AGXAccelerator") == 0
             ? reinterpret_cast<CFMutableDictionaryRef>(kByClass)
             : nullptr;
}
io_service_t IOServiceGetMatchingService(unsigned /*port*/, CFMutableDictionaryRef matching) {
  const auto kind = static_cast<int>(reinterpret_cast<intptr_t>(matching));
  const marlin::fake_gpu::Behaviour& gpu = marlin::fake_gpu::TheBehaviour();
  const bool there = kind == kByNumber ? gpu.registered_by_number : gpu.registered_by_class;
  return there ? 1 : IO_OBJECT_NULL;
}
CFTypeRef IORegistryEntryCreateCFProperty(io_service_t /*entry*/, CFStringRef key,
                                          CFAllocatorRef /*allocator*/, uint32_t /*options*/) {
  if (std::strcmp(reinterpret_cast<const char*>(key), "gpu-core-count") != 0) return nullptr;
  core_count = marlin::fake_gpu::TheBehaviour().cores;
  return &core_count;
}
int IOObjectRelease(io_object_t /*object*/) { return 0; }

CFStringRef CFStringCreateWithCString(CFAllocatorRef /*allocator*/, const char* text,
                                      uint32_t /*encoding*/) {
  return reinterpret_cast<CFStringRef>(text);
}
unsigned long CFGetTypeID(CFTypeRef /*value*/) { return 1; }
unsigned long CFNumberGetTypeID() { return 1; }
unsigned char CFNumberGetValue(CFNumberRef number, long /*type*/, void* value) {
  std::memcpy(value, number, sizeof(int));
  return 1;
}
void CFRelease(CFTypeRef /*value*/) {}
}
