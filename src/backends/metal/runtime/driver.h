// Driver: runs launches of Metal kernels on an Apple GPU or in the simulator. Memory is unified, so
// all addresses are host addresses.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "backends/metal/kernels/parameters.h"
#include "base/fixed_vector.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A buffer argument of a launch.
struct KernelBuffer {
  int index = 0;  ///< MARLIN_BUFFER_...
  const void* data = nullptr;
  int64_t bytes = 0;
  bool written = false;  ///< false: must not be written by anything while the launch runs.
  bool cleared = true;   ///< false: uninitialised; must be written before it is read.
};

/// Function constants by MARLIN_CONSTANT_...; those that a source does not declare are ignored.
using FunctionConstants = std::array<int32_t, MARLIN_CONSTANT_COUNT>;

struct MemoryRange {
  const void* data = nullptr;
  int64_t bytes = 0;
};

/// Memory that kernels read through addresses in their buffers, and that nothing writes while a
/// launch may read it. Drivers may derive their own.
struct ReachedMemory {
  explicit ReachedMemory(std::span<const MemoryRange> all) : ranges(all.begin(), all.end()) {}
  virtual ~ReachedMemory() = default;
  const std::vector<MemoryRange> ranges;
};

/// Memory that a launch reads or writes through addresses in its parameters or buffers, such as the
/// slabs of a KV cache.
struct AddressedRange {
  const void* data = nullptr;
  int64_t bytes = 0;
  bool written = false;
};

/// The bytes of a struct that host and kernel share.
class ParameterBlock {
 public:
  ParameterBlock() = default;
  template <typename T>
  explicit ParameterBlock(const T& value) : bytes_(sizeof(T)) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(bytes_.data(), &value, sizeof(T));
  }

  bool empty() const { return bytes_.empty(); }
  std::span<const std::byte> bytes() const { return bytes_; }
  /// Precondition: it was made from a T.
  template <typename T>
  T& As() {
    assert(bytes_.size() == sizeof(T));
    return *reinterpret_cast<T*>(bytes_.data());
  }

 private:
  std::vector<std::byte> bytes_;
};

/// The most buffer arguments of a launch.
inline constexpr size_t kMostKernelBuffers = 16;

/// One dispatch of a kernel.
struct KernelLaunch {
  std::string_view source;    ///< "gemv.metal"
  std::string_view function;  ///< The host_name. Like `source`, points to a string literal.
  FunctionConstants constants{};
  FixedVector<KernelBuffer, kMostKernelBuffers> buffers;
  kernels::Parameters parameters{};
  ParameterBlock other_parameters;  ///< For kernels that take another struct, or empty.
  /// Weights, which no launch writes; null: none.
  std::shared_ptr<const ReachedMemory> reached;
  std::vector<AddressedRange> addressed;  ///< Besides `reached`.
  std::array<uint32_t, 3> threadgroups{1, 1, 1};
  uint32_t threads = 32;  ///< Threads per threadgroup.
  /// About how many operations it takes, as gemm/row_parts.h counts them; 0: few. Drivers bound the
  /// work that they give to the GPU at once.
  int64_t operations = 0;
};

/// The bytes bound to MARLIN_BUFFER_PARAMETERS.
inline std::span<const std::byte> ParameterBytes(const KernelLaunch& launch) {
  if (!launch.other_parameters.empty()) return launch.other_parameters.bytes();
  return std::as_bytes(std::span(&launch.parameters, 1));
}

/// Looks at the results of completed work for errors of its operands. Work that is recorded runs
/// again, so a check leaves the words that it looks at as they were before the work.
using ResultCheck = std::function<Status()>;

/// Device properties that launch plans depend on.
struct DeviceShape {
  int cores = 8;
  /// Whether simdgroup_matrix has the element layout of kernels::FragmentRow.
  bool known_fragments = true;
  bool fast_math = false;  ///< Compiled with fast math: sums may be reassociated.
};

struct DriverInfo {
  std::string name;   ///< The name for Device::Open.
  std::string model;  ///< "Apple M2", "simulator".
  std::vector<std::string> features;
};

/// The launches of one Run, with the check of RunAndCheck; empty: none.
struct CheckedLaunches {
  std::vector<KernelLaunch> launches;
  ResultCheck check;
};

/// Launches that a driver has bound once, to run them often. The memory that they use, and the
/// driver, outlive it.
class BoundLaunches {
 public:
  virtual ~BoundLaunches() = default;
  /// Runs them as RunAndCheck does, on the driver's own stream. One run at a time.
  virtual Status Run() = 0;
};

/// One device. Thread-safe.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual DriverInfo Info() const = 0;
  virtual DeviceShape Shape() const = 0;
  /// Whether an earlier process found every kernel of this build right on this device.
  virtual bool kernels_known_right() const { return false; }
  /// Lets later processes know it; may fail to.
  virtual void RememberRightKernels() {}

  /// Runs launches in order: each sees the writes of those before it. May return before they
  /// complete. Errors: kUnsupported (a kernel that does not compile here), kDeviceLost.
  virtual Status Run(std::span<const KernelLaunch> launches, void* stream) = 0;
  /// The same, with a check once they have completed, whose error the next Synchronize returns
  /// unless calls_block(). The default is for drivers whose calls do.
  virtual Status RunAndCheck(std::span<const KernelLaunch> launches, void* stream,
                             const ResultCheck& check) {
    const Status status = Run(launches, stream);
    return status.ok() ? check() : status;
  }
  /// Waits for all work on the stream; null: on every stream. Errors: from the work.
  virtual Status Synchronize(void* stream) = 0;
  /// Waits for the work on the stream that uses a range of this driver's memory; null: for that on
  /// every stream. The default waits for all work. Errors: from the work.
  virtual Status WaitFor(const MemoryRange& /*range*/, void* stream) { return Synchronize(stream); }
  /// false: Run may return before its work completes.
  virtual bool calls_block() const = 0;
  /// Binds launches whose memory is this driver's. The default runs them one call after another.
  /// Null: they cannot be bound. Errors: as Run.
  virtual Result<std::unique_ptr<BoundLaunches>> Bind(std::vector<CheckedLaunches> calls);

  /// Aligned to 64 bytes or more. Errors: kOutOfMemory.
  virtual Result<void*> Allocate(int64_t bytes) = 0;
  virtual void Free(void* data) = 0;
  /// The address, for kernels, of memory that Allocate gave. The default: the host's.
  virtual uint64_t AddressOf(const void* data) const { return reinterpret_cast<uintptr_t>(data); }
  /// Ranges of such memory, for KernelLaunch::reached. They must not overlap.
  virtual std::shared_ptr<const ReachedMemory> Reach(std::span<const MemoryRange> ranges) const {
    return std::make_shared<ReachedMemory>(ranges);
  }
};

struct FreeDriverMemory {
  Driver* driver = nullptr;
  void operator()(void* data) const { driver->Free(data); }
};
/// Elements in a driver's memory. The driver must outlive them.
template <typename T>
using DriverMemory = std::unique_ptr<T[], FreeDriverMemory>;

/// Uninitialised. Errors: kOutOfMemory.
template <typename T>
Result<DriverMemory<T>> AllocateMemory(Driver& driver, int64_t count) {
  Result<void*> data = driver.Allocate(count * int64_t{sizeof(T)});
  if (!data.ok()) return data.status();
  return DriverMemory<T>(static_cast<T*>(*data), {&driver});
}

}  // namespace marlin::metal
