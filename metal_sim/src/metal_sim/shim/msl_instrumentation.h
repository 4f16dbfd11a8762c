// The callbacks that clang's ThreadSanitizer instrumentation puts before every access of a kernel,
// and UndefinedBehaviorSanitizer's before a division by zero, which would end the process, before
// an access that is not aligned as its type, and for an index beyond an array: they tell the
// simulator. Nothing of ThreadSanitizer itself is linked. Atomic operations of C++
// and guards of static variables have none here: Metal has neither, and the linker refuses them.
#pragma once

#include "metal_sim/shim/msl_runtime.h"

// Hidden, so that a process with a real ThreadSanitizer keeps its own; and not instrumented.
#define METAL_SIM_CALLBACK \
  __attribute__((visibility("hidden"), used, noinline, disable_sanitizer_instrumentation)) inline

#define METAL_SIM_REPORT(ADDRESS, BYTES, WRITE)                                 \
  if (metal_sim::attached_runtime != nullptr) {                                 \
    metal_sim::attached_runtime->access(ADDRESS, BYTES, WRITE, METAL_SIM_SITE); \
  }

#define METAL_SIM_ACCESS(NAME, BYTES)                                                              \
  METAL_SIM_CALLBACK void __tsan_##NAME##read##BYTES(void* address){METAL_SIM_REPORT(              \
      address, BYTES, false)} METAL_SIM_CALLBACK void __tsan_##NAME##write##BYTES(void* address) { \
    METAL_SIM_REPORT(address, BYTES, true)                                                         \
  }
#define METAL_SIM_ACCESSES(BYTES)                                                            \
  METAL_SIM_ACCESS(, BYTES)                                                                  \
  METAL_SIM_ACCESS(unaligned_, BYTES)                                                        \
  METAL_SIM_ACCESS(volatile_, BYTES)                                                         \
  METAL_SIM_ACCESS(unaligned_volatile_, BYTES)                                               \
  METAL_SIM_CALLBACK void __tsan_read_write##BYTES(void* address){                           \
      METAL_SIM_REPORT(address, BYTES, false) METAL_SIM_REPORT(                              \
          address, BYTES,                                                                    \
          true)} METAL_SIM_CALLBACK void __tsan_unaligned_read_write##BYTES(void* address) { \
    METAL_SIM_REPORT(address, BYTES, false)                                                  \
    METAL_SIM_REPORT(address, BYTES, true)                                                   \
  }

namespace metal_sim {

// The arguments of UndefinedBehaviorSanitizer's callbacks.
struct SourcePlace {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct TypeDescriptor {
  uint16_t kind;
  uint16_t info;
  char name[1];  // In quotes, and as long as it is.
};
struct TypeMismatch {
  SourcePlace place;
  const TypeDescriptor* type;
  uint8_t log_alignment;
  uint8_t kind;
};
struct OutOfBounds {
  SourcePlace place;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

}  // namespace metal_sim

extern "C" {

METAL_SIM_ACCESSES(1)
METAL_SIM_ACCESSES(2)
METAL_SIM_ACCESSES(4)
METAL_SIM_ACCESSES(8)
METAL_SIM_ACCESSES(16)

METAL_SIM_CALLBACK void __tsan_init() {}
METAL_SIM_CALLBACK void __tsan_func_entry(void*) {}
METAL_SIM_CALLBACK void __tsan_func_exit() {}

// Pointers to tables of virtual functions, which no kernel has in checked memory.
METAL_SIM_CALLBACK void __tsan_vptr_read(void** address){
    METAL_SIM_REPORT(address, sizeof(void*), false)} METAL_SIM_CALLBACK
    void __tsan_vptr_update(void** address, void*){METAL_SIM_REPORT(address, sizeof(void*), true)}

METAL_SIM_CALLBACK void* __tsan_memcpy(void* destination, const void* source, size_t bytes) {
  METAL_SIM_REPORT(source, bytes, false)
  METAL_SIM_REPORT(destination, bytes, true)
  return __builtin_memmove(destination, source, bytes);
}
METAL_SIM_CALLBACK void* __tsan_memmove(void* destination, const void* source, size_t bytes) {
  METAL_SIM_REPORT(source, bytes, false)
  METAL_SIM_REPORT(destination, bytes, true)
  return __builtin_memmove(destination, source, bytes);
}
METAL_SIM_CALLBACK void* __tsan_memset(void* destination, int value, size_t bytes) {
  METAL_SIM_REPORT(destination, bytes, true)
  return __builtin_memset(destination, value, bytes);
}

METAL_SIM_CALLBACK void __ubsan_handle_type_mismatch_v1_abort(metal_sim::TypeMismatch* found,
                                                              uintptr_t) {
  if (metal_sim::attached_runtime != nullptr) {
    char what[200];
    __builtin_snprintf(what, sizeof(what), "misaligned access: %.100s needs %u bytes",
                       found->type->name, 1u << found->log_alignment);
    metal_sim::attached_runtime->fault(what, METAL_SIM_SITE);
  }
  __builtin_trap();
}
METAL_SIM_CALLBACK void __ubsan_handle_out_of_bounds_abort(metal_sim::OutOfBounds* found,
                                                           uintptr_t index) {
  if (metal_sim::attached_runtime != nullptr) {
    char what[200];
    __builtin_snprintf(what, sizeof(what), "index %ld beyond the array %.100s",
                       static_cast<long>(index), found->array->name);
    metal_sim::attached_runtime->fault(what, METAL_SIM_SITE);
  }
  __builtin_trap();
}
METAL_SIM_CALLBACK void __ubsan_handle_divrem_overflow_abort(void*, uintptr_t, uintptr_t) {
  if (metal_sim::attached_runtime != nullptr) {
    metal_sim::attached_runtime->fault("division of an integer by zero", METAL_SIM_SITE);
  }
  __builtin_trap();
}
}

#undef METAL_SIM_ACCESSES
#undef METAL_SIM_ACCESS
#undef METAL_SIM_REPORT
#undef METAL_SIM_CALLBACK
