// How kernels are entered and where their threads meet: arguments, threadgroup variables, barriers
// and fences. Knows the simulator only as its table of functions.
#pragma once

#include <utility>

#include "metal_sim/shim/msl_vector.h"

namespace metal_sim_program::metal {

/// A value that is the same in all threads. Not checked.
template <typename T>
using uniform = T;
template <typename T>
METAL_SIM_INLINE constexpr T make_uniform(T value) {
  return value;
}

enum class mem_flags : uint {
  mem_none = metal_sim::kNone,
  mem_device = metal_sim::kDevice,
  mem_threadgroup = metal_sim::kThreadgroup,
  mem_texture = metal_sim::kTexture,
};
constexpr mem_flags operator|(mem_flags left, mem_flags right) {
  return static_cast<mem_flags>(static_cast<uint>(left) | static_cast<uint>(right));
}
constexpr mem_flags operator&(mem_flags left, mem_flags right) {
  return static_cast<mem_flags>(static_cast<uint>(left) & static_cast<uint>(right));
}

enum memory_order : int {
  memory_order_relaxed = metal_sim::kRelaxed,
  memory_order_acquire = metal_sim::kAcquire,
  memory_order_release = metal_sim::kRelease,
  memory_order_acq_rel = metal_sim::kAcquireRelease,
  memory_order_seq_cst = metal_sim::kSequential,
};

enum thread_scope : int {
  thread_scope_thread = metal_sim::kThreadScope,
  thread_scope_simdgroup = metal_sim::kSimdgroupScope,
  thread_scope_threadgroup = metal_sim::kThreadgroupScope,
  thread_scope_device = metal_sim::kDeviceScope,
};
// Programs for versions of Metal without it declare it themselves, which hides this one.
namespace scopes {
inline constexpr thread_scope thread_scope_system =
    static_cast<thread_scope>(metal_sim::kSystemScope);
}
using namespace scopes;

METAL_SIM_CONVERGENT inline void threadgroup_barrier(mem_flags flags) {
  metal_sim::attached_runtime->threadgroup_barrier(static_cast<uint>(flags), METAL_SIM_SITE);
}

METAL_SIM_CONVERGENT inline void simdgroup_barrier(mem_flags flags) {
  metal_sim::attached_runtime->simdgroup_barrier(static_cast<uint>(flags), METAL_SIM_SITE);
}

METAL_SIM_CONVERGENT inline void atomic_thread_fence(mem_flags flags, memory_order order,
                                                     thread_scope scope = thread_scope_device) {
  metal_sim::attached_runtime->fence(static_cast<uint>(flags), order, scope, METAL_SIM_SITE);
}

}  // namespace metal_sim_program::metal

namespace metal_sim {

/// The variable `id` of the current threadgroup, uninitialised at first. T may be an array.
template <typename T>
METAL_SIM_UNINSTRUMENTED T& ThreadgroupVariable(int id, const char* name) {
  return *static_cast<T*>(attached_runtime->threadgroup_variable(id, sizeof(T), alignof(T), name));
}

/// The value of a parameter of type T: a built-in input, a scalar or a vector of uint or ushort.
template <typename T>
struct Fetch {
  static_assert(Operand<std::remove_cv_t<T>>,
                "a parameter of a kernel is a pointer, a reference or a built-in input");
  METAL_SIM_UNINSTRUMENTED static T Get(const Argument& argument) {
    const Triple position = attached_runtime->position(argument.source);
    if constexpr (Vector<std::remove_cv_t<T>>) {
      const uint values[] = {position.x, position.y, position.z};
      std::remove_cv_t<T> result;
      static_assert(kCount<T> <= 3, "positions have at most three components");
      for (int i = 0; i < kCount<T>; ++i) result[i] = static_cast<Element<T>>(values[i]);
      return result;
    } else {
      return static_cast<T>(position.x);
    }
  }
};

template <typename T>
struct Fetch<T*> {
  METAL_SIM_UNINSTRUMENTED static T* Get(const Argument& argument) {
    void* address = argument.source == Source::kThreadgroupMemory
                        ? attached_runtime->threadgroup_memory(argument.index)
                        : attached_runtime->buffer(argument.index);
    return static_cast<T*>(address);
  }
};

template <typename T>
struct Fetch<T&> {
  METAL_SIM_UNINSTRUMENTED static T& Get(const Argument& argument) {
    return *Fetch<T*>::Get(argument);
  }
};

template <typename... Parameters, size_t... kIndices>
METAL_SIM_INLINE void InvokeWith(void (*function)(Parameters...), const Argument* arguments,
                                 std::index_sequence<kIndices...>) {
  function(Fetch<Parameters>::Get(arguments[kIndices])...);
}

/// Calls `function` as the current thread with the value that the simulator holds for each
/// parameter. `arguments` has one entry per parameter.
template <typename... Parameters>
METAL_SIM_INLINE void Invoke(void (*function)(Parameters...), const Argument* arguments) {
  InvokeWith(function, arguments, std::index_sequence_for<Parameters...>());
}

}  // namespace metal_sim
