// Metal's atomic types and operations. Every operation tells the simulator first, which may run
// other threads there, and is then done in one piece: all threads of a simulation share one thread
// of the machine.
#pragma once

#include "metal_sim/shim/msl_kernel.h"

namespace metal_sim {

template <typename T>
concept AtomicScalar =
    std::is_same_v<T, int> || std::is_same_v<T, uint> || std::is_same_v<T, bool> ||
    std::is_same_v<T, float> || std::is_same_v<T, ulong> || std::is_same_v<T, long>;

}  // namespace metal_sim

namespace metal_sim_program::metal {

/// Memory that only the functions below touch.
template <metal_sim::AtomicScalar T>
struct atomic {
  T metal_sim_value;
};

using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;

}  // namespace metal_sim_program::metal

using metal::atomic_bool;
using metal::atomic_float;
using metal::atomic_int;
using metal::atomic_uint;
using metal::atomic_ulong;

namespace metal_sim {

/// Replaces *value by function(*value, operand) unless it is unchanged; returns the old value.
template <typename T, typename Function>
METAL_SIM_INLINE T Exchange(volatile metal::atomic<T>* object, T operand, int order,
                            const void* site, Function function) {
  attached_runtime->atomic(const_cast<const T*>(&object->metal_sim_value), sizeof(T),
                           /*read=*/true, /*write=*/true, order, site);
  const T before = object->metal_sim_value;
  object->metal_sim_value = function(before, operand);
  return before;
}

}  // namespace metal_sim

namespace metal_sim_program::metal {

template <typename T>
METAL_SIM_CONVERGENT T atomic_load_explicit(const volatile atomic<T>* object, memory_order order) {
  metal_sim::attached_runtime->atomic(const_cast<const T*>(&object->metal_sim_value), sizeof(T),
                                      /*read=*/true, /*write=*/false, order, METAL_SIM_SITE);
  return object->metal_sim_value;
}

template <typename T>
METAL_SIM_CONVERGENT void atomic_store_explicit(volatile atomic<T>* object,
                                                std::type_identity_t<T> desired,
                                                memory_order order) {
  metal_sim::attached_runtime->atomic(const_cast<const T*>(&object->metal_sim_value), sizeof(T),
                                      /*read=*/false, /*write=*/true, order, METAL_SIM_SITE);
  object->metal_sim_value = desired;
}

/// Fails spuriously, as Metal's may, only where another thread came in between. A failure is an
/// access that only reads, of order `failure`.
template <typename T>
METAL_SIM_CONVERGENT bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object,
                                                                T* expected,
                                                                std::type_identity_t<T> desired,
                                                                memory_order success,
                                                                memory_order failure) {
  const T* value = const_cast<const T*>(&object->metal_sim_value);
  const void* site = METAL_SIM_SITE;
  // The kernel's own accesses to *expected: the caller's call is where they are made.
  metal_sim::attached_runtime->access(expected, sizeof(T), /*write=*/false, site);
  const auto matches = [&]() __attribute__((disable_sanitizer_instrumentation, always_inline)) {
    // By bits, as the hardware compares: 0 and -0 differ.
    return __builtin_memcmp(value, expected, sizeof(T)) == 0;
  };
  const bool expects_success = matches();
  metal_sim::attached_runtime->atomic(value, sizeof(T), /*read=*/true, expects_success,
                                      expects_success ? success : failure, site);
  if (expects_success && matches()) {
    object->metal_sim_value = desired;
    return true;
  }
  metal_sim::attached_runtime->access(expected, sizeof(T), /*write=*/true, site);
  *expected = object->metal_sim_value;
  return false;
}

#define METAL_SIM_ATOMIC(NAME, TYPES, EXPRESSION)                                           \
  template <typename T>                                                                     \
  METAL_SIM_CONVERGENT T atomic_##NAME##_explicit(                                          \
      volatile atomic<T>* object, std::type_identity_t<T> operand, memory_order order) {    \
    static_assert(TYPES, "Metal has no atomic_" #NAME "_explicit for this type");           \
    return metal_sim::Exchange(                                                             \
        object, operand, order, METAL_SIM_SITE,                                             \
        [](T a, T b) __attribute__((disable_sanitizer_instrumentation, always_inline))->T { \
          return EXPRESSION;                                                                \
        });                                                                                 \
  }

METAL_SIM_ATOMIC(exchange, true, ((void)a, b))
METAL_SIM_ATOMIC(fetch_add, (!std::is_same_v<T, bool>), a + b)
METAL_SIM_ATOMIC(fetch_sub, (!std::is_same_v<T, bool>), a - b)
METAL_SIM_ATOMIC(fetch_and, std::is_integral_v<T>, a& b)
METAL_SIM_ATOMIC(fetch_or, std::is_integral_v<T>, a | b)
METAL_SIM_ATOMIC(fetch_xor, std::is_integral_v<T>, a ^ b)
METAL_SIM_ATOMIC(fetch_min, metal_sim::IntegerScalar<T>, b < a ? b : a)
METAL_SIM_ATOMIC(fetch_max, metal_sim::IntegerScalar<T>, a < b ? b : a)

// For ulong only, and without a result.
METAL_SIM_ATOMIC(min, (std::is_same_v<T, ulong>), b < a ? b : a)
METAL_SIM_ATOMIC(max, (std::is_same_v<T, ulong>), a < b ? b : a)

#undef METAL_SIM_ATOMIC

}  // namespace metal_sim_program::metal
