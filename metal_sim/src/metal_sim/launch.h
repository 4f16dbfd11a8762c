// The input and the report of a kernel launch on the host. Owns the types and the entry of the
// runtime; must not know how kernels are compiled or how a site becomes a line.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "metal_sim/byte_set.h"
#include "metal_sim/shim/abi.h"
#include "metal_sim/status.h"

namespace metal_sim {

struct Size3 {
  uint32_t x = 1, y = 1, z = 1;
};

/// A device buffer. The kernel works on a copy, which is copied back into `data` when the launch
/// ends, unless the buffer is read-only.
struct BufferBinding {
  void* data = nullptr;  ///< The caller's, for the whole of Simulate.
  int64_t bytes = 0;
  bool read_only = false;
  bool initialised = true;  ///< false: to read a byte before the kernel wrote it is a finding.
  std::string name = {};    ///< For findings and counters; empty: the argument's name.
};

/// [begin, end); of ranges that overlap, one that is written makes their common bytes writable.
struct AddressedRange {
  const void* begin = nullptr;
  const void* end = nullptr;
  bool written = false;
};

/// One dispatch. The keys of the maps are the indices of [[buffer(i)]] and [[threadgroup(i)]].
struct Launch {
  Size3 grid;
  Size3 threads_per_threadgroup;
  /// true: `grid` counts threads and threadgroups at the edges may be smaller
  /// (dispatchThreads); false: it counts threadgroups (dispatchThreadgroups).
  bool grid_counts_threads = false;
  std::map<int, BufferBinding> buffers;
  std::map<int, std::vector<uint8_t>> values;  ///< setBytes: at most 4096 bytes each.
  std::map<int, int64_t> threadgroup_memory;   ///< In bytes, multiples of 16.
  /// [begin, end) of memory that the kernel reads through addresses in its buffers (gpuAddress):
  /// read in place, never written, initialised. The ranges do not overlap.
  std::vector<std::pair<const void*, const void*>> reached_ranges;
  /// Memory besides that the kernel reads or writes through addresses, initialised. Ranges may
  /// overlap each other, and written ones no buffer.
  std::vector<AddressedRange> addressed_ranges;
  /// [begin, end) of the kernels' library: its constants may be read, nothing else of it.
  std::vector<std::pair<const void*, const void*>> program_ranges;
};

struct SimulationOptions {
  /// 0: threads take turns in order. Otherwise the order of threads and threadgroups is drawn from
  /// this seed; the same seed gives the same run.
  uint64_t seed = 0;
  /// With a seed: the probability that a thread is interrupted at a memory access, 0 to 1.
  double preemption = 0;
  int resident_threadgroups = 4;  ///< How many run interleaved, 1 to 64.
  /// false: bounds are checked, races and uninitialised reads are not.
  bool check = true;
  int msl_version = 310;                     ///< 310 is MSL 3.1.
  int64_t threadgroup_memory_limit = 32768;  ///< Bytes per threadgroup.
  /// The launch ends with kDeadlock after this many turns (a thread's at an atomic operation, or
  /// after 1024 accesses) in which no thread ended or passed a barrier or a collective.
  int64_t step_limit = 20'000'000;
};

enum class FindingKind : uint8_t {
  kRace,
  kOutOfBounds,
  kUninitialisedRead,
  kDivergentBarrier,
  kDivergentCollective,
  kDeadlock,
  kReadOnlyWrite,
  kWildAccess,
  kForeignThreadgroupMemory,
  kThreadgroupMemoryLimit,
  kUnsupportedOrder,
  kUndefinedOperation,
};

/// Returns a few words for people, e.g. "out of bounds".
const char* FindingKindName(FindingKind kind);

/// An error of the kernel. Findings of one kind at the same sites are one with a count.
struct Finding {
  FindingKind kind;
  std::string text;  ///< One line: what, where in which buffer or variable, which threads.
  uint64_t count = 1;
  const void* site = nullptr;        ///< Address in the kernel's code, or null.
  const void* other_site = nullptr;  ///< The earlier access, the other barrier, or null.
};

/// Traffic of one device buffer or value, over all threads.
struct BufferCounters {
  std::string name;
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t unique_bytes_read = 0;
  int64_t unique_bytes_written = 0;
  int64_t reads = 0;
  int64_t writes = 0;
};

struct Counters {
  std::vector<BufferCounters> buffers;  ///< By index.
  int64_t reached_bytes_read = 0;       ///< From Launch::reached_ranges, over all threads.
  int64_t addressed_bytes_read = 0;     ///< From Launch::addressed_ranges, over all threads.
  int64_t addressed_bytes_written = 0;
  int64_t threadgroup_bytes = 0;  ///< Memory of one threadgroup: the largest.
  int64_t threadgroup_bytes_read = 0;
  int64_t threadgroup_bytes_written = 0;
  int64_t threadgroup_barriers = 0;  ///< Once per threadgroup that passes one.
  int64_t simdgroup_barriers = 0;    ///< Once per simdgroup that passes one.
  int64_t simdgroup_operations = 0;  ///< Collectives, once per simdgroup.
  int64_t matrix_operations = 0;
  int64_t multiply_adds = 0;  ///< Done by matrix operations.
  int64_t atomics = 0;
  int64_t threads = 0;
  int64_t threadgroups = 0;
};

/// Accesses of a launch to a piece of the caller's memory.
struct ObservedAccess {
  std::string name;
  const void* data = nullptr;
  size_t bytes = 0;
  ByteSet read;
  ByteSet written;
};

struct Report {
  std::vector<Finding> findings;  ///< In order of appearance, at most 1000.
  Counters counters;
  std::vector<ObservedAccess> observed;  ///< To buffers and addressed ranges, not to reached ones.
  bool clean() const { return findings.empty(); }
};

/// Runs one dispatch of `kernel`, whose module is attached to SimulatorRuntime(), on the calling
/// thread. Launches on several threads do not disturb each other. An error of the kernel is a
/// finding; the launch goes on where it can and ends early where it cannot (an address that the
/// simulator does not know, a deadlock). An endless loop without memory accesses is not noticed.
/// Errors: kInvalidArgument (an argument without a binding, sizes of zero, more than 1024 threads
/// per threadgroup, threadgroup memory not set, options out of range), kUnsupported (bindings that
/// overlap and are written), kOutOfMemory.
Result<Report> Simulate(const Kernel& kernel, const Launch& launch,
                        const SimulationOptions& options);

/// The table that modules are attached to. Its functions do nothing outside of Simulate.
const Runtime* SimulatorRuntime();

}  // namespace metal_sim
