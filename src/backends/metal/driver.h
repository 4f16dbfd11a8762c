// What runs the launches of Metal kernels: an Apple GPU, or the simulator. Memory is the host's and
// the device's at once, so addresses are the host's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/metal/kernels/parameters.h"
#include "base/fixed_vector.h"
#include "marlin/status.h"

namespace marlin::metal {

/// What a kernel's buffer is bound to.
struct KernelBuffer {
  int index = 0;  ///< MARLIN_BUFFER_...
  const void* data = nullptr;
  int64_t bytes = 0;
  bool written = false;  ///< Else nothing may write it while the launch runs.
  bool cleared = true;   ///< false: it holds nothing that may be read before it is written.
};

/// Values of the function constants, by number; of those that the kernel's source has.
using FunctionConstants = std::array<int32_t, MARLIN_CONSTANT_COUNT>;

/// One dispatch of a kernel.
struct KernelLaunch {
  std::string_view source;    ///< "gemv.metal"
  std::string_view function;  ///< The host_name; as the source's, a literal.
  FunctionConstants constants{};
  FixedVector<KernelBuffer, MARLIN_BUFFER_PARAMETERS> buffers;
  kernels::Parameters parameters{};
  std::array<uint32_t, 3> threadgroups{1, 1, 1};
  uint32_t threads = 32;  ///< Of a threadgroup.
};

/// What launch plans may know about a device.
struct DeviceShape {
  int cores = 8;
  /// Whether the elements of matrix fragments lie where kernels::FragmentRow says.
  bool known_fragments = true;
  bool fast_math = false;  ///< Kernels are compiled so that sums may be reordered.
};

struct DriverInfo {
  std::string name;   ///< What Device::Open takes.
  std::string model;  ///< "Apple M2", "simulator".
  std::vector<std::string> features;
};

/// One device. Thread-safe.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual DriverInfo Info() const = 0;
  virtual DeviceShape Shape() const = 0;

  /// Runs launches one after the other: each sees what the ones before wrote. May return before
  /// they are done. Errors: kUnsupported (a kernel that does not compile here), kDeviceLost.
  virtual Status Run(std::span<const KernelLaunch> launches, void* stream) = 0;
  /// Waits for everything that was run on the stream; null: on any. Errors: of the work itself.
  virtual Status Synchronize(void* stream) = 0;
  /// false: Run may return before its work is done.
  virtual bool calls_block() const = 0;

  /// Aligned to 64 bytes or more. Errors: kOutOfMemory.
  virtual Result<void*> Allocate(int64_t bytes) = 0;
  virtual void Free(void* data) = 0;
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
