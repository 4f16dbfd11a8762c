// The interface between a compiled Metal kernel and the simulator. Kernels are shared libraries of
// their own, instrumented; they see this header and the shim around it, never the simulator's
// code. Everything they need comes through one table of functions, so nothing is exported to them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace metal_sim {

struct Triple {
  uint32_t x;
  uint32_t y;
  uint32_t z;
};

/// Where an argument of a kernel comes from.
enum class Source : uint8_t {
  kBuffer,             ///< [[buffer(index)]]
  kThreadgroupMemory,  ///< [[threadgroup(index)]]
  kThreadPositionInGrid,
  kThreadPositionInThreadgroup,
  kThreadgroupPositionInGrid,
  kThreadIndexInThreadgroup,
  kThreadIndexInSimdgroup,
  kSimdgroupIndexInThreadgroup,
  kThreadIndexInQuadgroup,
  kQuadgroupIndexInThreadgroup,
  kThreadsPerThreadgroup,
  kThreadsPerGrid,
  kThreadgroupsPerGrid,
  kSimdgroupsPerThreadgroup,
  kThreadsPerSimdgroup,
  kDispatchThreadsPerThreadgroup,
};

struct Argument {
  Source source;
  int index;  ///< The index of a buffer or of threadgroup memory.
  const char* name;
  /// Whether its [[function_constant(...)]] is true; null: it has none. Others are not bound.
  bool (*present)() = nullptr;

  bool IsPresent() const { return present == nullptr || present(); }
};

struct Kernel {
  const char* name;  ///< host_name, or the function's.
  const Argument* arguments;
  int argument_count;
  void (*run)();  ///< Runs the kernel as the current thread.
  /// [[max_total_threads_per_threadgroup]]; 0 where it has none.
  uint32_t max_threads = 0;
};

/// A variable with [[function_constant(index)]].
struct FunctionConstant {
  int index;
  const char* name;
  void* value;
  uint32_t bytes;
  bool* defined;
};

struct Module {
  const Kernel* kernels;
  int kernel_count;
  const FunctionConstant* constants;
  int constant_count;
};

/// Called once with the published data of all lanes that take part: data[lane], null where a lane
/// does not; bit i of `lanes` is lane i.
using Collective = void (*)(void* const* data, uint32_t lanes, void* context);

/// The simulator, as the current thread of a kernel sees it. A `site` is an address in the kernel's
/// code that reports name.
struct Runtime {
  void* (*buffer)(int index);
  void* (*threadgroup_memory)(int index);
  /// Storage of a threadgroup variable: the same for all threads of a threadgroup; `id` is unique
  /// in its module.
  void* (*threadgroup_variable)(int id, size_t bytes, size_t alignment, const char* name);
  Triple (*position)(Source source);  ///< Scalars in x.
  uint32_t (*lane)();
  void (*threadgroup_barrier)(uint32_t flags, const void* site);
  void (*simdgroup_barrier)(uint32_t flags, const void* site);
  /// Publishes `data` to the active lanes of the simdgroup; the last to come runs `function`.
  /// `whole`: every lane of the simdgroup must take part.
  void (*collective)(void* data, Collective function, void* context, const char* name, bool whole,
                     const void* site);
  void (*access)(const void* address, size_t bytes, bool write, const void* site);
  /// Before an atomic operation; `order` as in MSL's memory_order.
  void (*atomic)(const void* address, size_t bytes, bool read, bool write, int order,
                 const void* site);
  /// atomic_thread_fence; `scope` as in MSL's thread_scope.
  void (*fence)(uint32_t flags, int order, int scope, const void* site);
  void (*count_matrix_operation)(uint64_t multiply_adds);
  /// The kernel is about to do something that this processor cannot: `what` in a few words. Ends
  /// the launch: does not return to a kernel.
  void (*fault)(const char* what, const void* site);
  /// Within a collective: what it gives to a lane is undefined, `what` in a few words.
  void (*undefined)(const char* what);
};

/// MSL's mem_flags, memory_order and thread_scope, as the runtime reads them.
enum MemoryFlags : uint32_t { kNone = 0, kDevice = 1, kThreadgroup = 2, kTexture = 4 };
enum Order : int { kRelaxed = 0, kAcquire = 2, kRelease = 3, kAcquireRelease = 4, kSequential = 5 };
enum Scope : int {
  kSimdgroupScope = -1,
  kThreadScope = 0,
  kThreadgroupScope = 1,
  kDeviceScope = 2,
  kSystemScope = 3
};

}  // namespace metal_sim

extern "C" {
/// Exported by every compiled library of kernels.
const metal_sim::Module* metal_sim_module();
void metal_sim_attach(const metal_sim::Runtime* runtime);
}
