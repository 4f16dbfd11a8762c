// Part of type_check.h: functions of elements, barriers, fences and atomics.
#pragma once

#include "metal_sim/shim/type_check_vector.h"

namespace metal_sim_program::metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags left, mem_flags right);
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

// Functions of elements: the operands' type. A scalar with a vector stands for all elements.
#define METAL_SIM_DECLARE_1(NAME) \
  template <typename T>           \
  T NAME(T x);
#define METAL_SIM_DECLARE_2(NAME)    \
  template <typename T>              \
  T NAME(T x, metal_sim::Same<T> y); \
  template <typename T, int N>       \
  vec<T, N> NAME(metal_sim::Same<T> x, vec<T, N> y);
#define METAL_SIM_DECLARE_3(NAME) \
  template <typename T>           \
  T NAME(T x, metal_sim::Same<T> y, metal_sim::Same<T> z);

}  // namespace metal_sim_program::metal

namespace metal_sim {

template <typename T>
struct Identity {
  using type = T;
};
/// A parameter that nothing is deduced from.
template <typename T>
using Same = typename Identity<T>::type;

}  // namespace metal_sim

#define METAL_SIM_DECLARE_MATH   \
  METAL_SIM_DECLARE_1(abs)       \
  METAL_SIM_DECLARE_1(acos)      \
  METAL_SIM_DECLARE_1(asin)      \
  METAL_SIM_DECLARE_1(atan)      \
  METAL_SIM_DECLARE_1(ceil)      \
  METAL_SIM_DECLARE_1(cos)       \
  METAL_SIM_DECLARE_1(cosh)      \
  METAL_SIM_DECLARE_1(exp)       \
  METAL_SIM_DECLARE_1(exp10)     \
  METAL_SIM_DECLARE_1(exp2)      \
  METAL_SIM_DECLARE_1(fabs)      \
  METAL_SIM_DECLARE_1(floor)     \
  METAL_SIM_DECLARE_1(fract)     \
  METAL_SIM_DECLARE_1(log)       \
  METAL_SIM_DECLARE_1(log10)     \
  METAL_SIM_DECLARE_1(log2)      \
  METAL_SIM_DECLARE_1(rint)      \
  METAL_SIM_DECLARE_1(round)     \
  METAL_SIM_DECLARE_1(rsqrt)     \
  METAL_SIM_DECLARE_1(saturate)  \
  METAL_SIM_DECLARE_1(sign)      \
  METAL_SIM_DECLARE_1(sin)       \
  METAL_SIM_DECLARE_1(sinh)      \
  METAL_SIM_DECLARE_1(sqrt)      \
  METAL_SIM_DECLARE_1(tan)       \
  METAL_SIM_DECLARE_1(tanh)      \
  METAL_SIM_DECLARE_1(trunc)     \
  METAL_SIM_DECLARE_2(atan2)     \
  METAL_SIM_DECLARE_2(copysign)  \
  METAL_SIM_DECLARE_2(divide)    \
  METAL_SIM_DECLARE_2(fmax)      \
  METAL_SIM_DECLARE_2(fmin)      \
  METAL_SIM_DECLARE_2(fmod)      \
  METAL_SIM_DECLARE_2(max)       \
  METAL_SIM_DECLARE_2(min)       \
  METAL_SIM_DECLARE_2(nextafter) \
  METAL_SIM_DECLARE_2(pow)       \
  METAL_SIM_DECLARE_2(powr)      \
  METAL_SIM_DECLARE_2(step)      \
  METAL_SIM_DECLARE_3(clamp)     \
  METAL_SIM_DECLARE_3(fma)       \
  METAL_SIM_DECLARE_3(max3)      \
  METAL_SIM_DECLARE_3(median3)   \
  METAL_SIM_DECLARE_3(min3)      \
  METAL_SIM_DECLARE_3(mix)       \
  METAL_SIM_DECLARE_3(smoothstep)

namespace metal_sim_program::metal {

METAL_SIM_DECLARE_MATH
namespace precise {
METAL_SIM_DECLARE_MATH
}
namespace fast {
METAL_SIM_DECLARE_MATH
}

METAL_SIM_DECLARE_1(clz)
METAL_SIM_DECLARE_1(ctz)
METAL_SIM_DECLARE_1(popcount)
METAL_SIM_DECLARE_1(reverse_bits)
METAL_SIM_DECLARE_2(absdiff)
METAL_SIM_DECLARE_2(addsat)
METAL_SIM_DECLARE_2(hadd)
METAL_SIM_DECLARE_2(mul24)
METAL_SIM_DECLARE_2(mulhi)
METAL_SIM_DECLARE_2(rhadd)
METAL_SIM_DECLARE_2(rotate)
METAL_SIM_DECLARE_2(subsat)
METAL_SIM_DECLARE_3(mad24)
METAL_SIM_DECLARE_3(madhi)
METAL_SIM_DECLARE_3(madsat)
template <typename T>
T extract_bits(T value, uint offset, uint bits);
template <typename T>
T insert_bits(T base, T insert, uint offset, uint bits);
template <typename T>
T ldexp(T value, int exponent);
template <typename T>
T sincos(T value, thread T& cosine);
template <typename T, typename C>
T select(T otherwise, metal_sim::Same<T> value, C condition);
template <typename T>
bool all(T condition);
template <typename T>
bool any(T condition);

// Functions of single elements; functions of vectors, element by element, are not declared.
bool isnan(float value);
bool isinf(float value);
bool isfinite(float value);
bool signbit(float value);

template <typename T, int N>
T dot(vec<T, N> x, vec<T, N> y);
template <typename T, int N>
T length(vec<T, N> x);
template <typename T, int N>
T length_squared(vec<T, N> x);
template <typename T, int N>
vec<T, N> normalize(vec<T, N> x);

enum memory_order : int {
  memory_order_relaxed,
  memory_order_acquire = 2,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope : int {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system
};
void atomic_thread_fence(mem_flags flags, memory_order order,
                         thread_scope scope = thread_scope_device);

template <typename T>
struct atomic {
  T metal_sim_value;
};

#define METAL_SIM_DECLARE_ATOMIC(NAME, SPACE)                                              \
  template <typename T>                                                                    \
  T atomic_##NAME##_explicit(SPACE volatile atomic<T>* object, metal_sim::Same<T> operand, \
                             memory_order order);
#define METAL_SIM_DECLARE_ATOMICS(SPACE)                                                           \
  template <typename T>                                                                            \
  T atomic_load_explicit(SPACE const volatile atomic<T>* object, memory_order order);              \
  template <typename T>                                                                            \
  void atomic_store_explicit(SPACE volatile atomic<T>* object, metal_sim::Same<T> value,           \
                             memory_order order);                                                  \
  template <typename T>                                                                            \
  bool atomic_compare_exchange_weak_explicit(SPACE volatile atomic<T>* object, thread T* expected, \
                                             metal_sim::Same<T> desired, memory_order success,     \
                                             memory_order failure);                                \
  METAL_SIM_DECLARE_ATOMIC(exchange, SPACE)                                                        \
  METAL_SIM_DECLARE_ATOMIC(fetch_add, SPACE)                                                       \
  METAL_SIM_DECLARE_ATOMIC(fetch_sub, SPACE)                                                       \
  METAL_SIM_DECLARE_ATOMIC(fetch_and, SPACE)                                                       \
  METAL_SIM_DECLARE_ATOMIC(fetch_or, SPACE)                                                        \
  METAL_SIM_DECLARE_ATOMIC(fetch_xor, SPACE)                                                       \
  METAL_SIM_DECLARE_ATOMIC(fetch_min, SPACE)                                                       \
  METAL_SIM_DECLARE_ATOMIC(fetch_max, SPACE)

METAL_SIM_DECLARE_ATOMICS(__global)
METAL_SIM_DECLARE_ATOMICS(__local)

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

namespace metal_sim_program::metal {

struct os_log {
  constexpr os_log(__constant const char*, __constant const char*) {}
  template <typename... Values>
  void log(__constant const char* format, Values... values) const __constant;
  template <typename... Values>
  void log_info(__constant const char* format, Values... values) const __constant;
  template <typename... Values>
  void log_debug(__constant const char* format, Values... values) const __constant;
  template <typename... Values>
  void log_error(__constant const char* format, Values... values) const __constant;
  template <typename... Values>
  void log_fault(__constant const char* format, Values... values) const __constant;
};
extern __constant os_log os_log_default;

}  // namespace metal_sim_program::metal

// Apple's built-in functions (msl_builtins.h).
#define __METAL_PRECISE_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_MAYBE_FAST_MATH__ 1
#define METAL_SIM_DECLARE_BUILTIN(NAME)   \
  template <typename T, typename... More> \
  T __metal_##NAME(T x, More... more);

METAL_SIM_BUILTINS_1(METAL_SIM_DECLARE_BUILTIN)
METAL_SIM_BUILTINS_2(METAL_SIM_DECLARE_BUILTIN)
METAL_SIM_BUILTINS_3(METAL_SIM_DECLARE_BUILTIN)
METAL_SIM_SIMD_BUILTINS(METAL_SIM_DECLARE_BUILTIN)
METAL_SIM_DECLARE_BUILTIN(fma)
METAL_SIM_DECLARE_BUILTIN(frexp)
METAL_SIM_DECLARE_BUILTIN(ldexp)
METAL_SIM_DECLARE_BUILTIN(nextafter)
METAL_SIM_DECLARE_BUILTIN(get_simdgroup_size)
METAL_SIM_DECLARE_BUILTIN(get_thread_index_in_simdgroup)

#undef METAL_SIM_DECLARE_BUILTIN
