// Devices: where prepared weights live and products run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// One kernel as `metal-marlin devices` lists it.
struct KernelInfo {
  std::string name;
  std::string op;
  bool available = false;
  std::string reason;         ///< Why it is not available; empty when it is.
  bool only_by_name = false;  ///< Runs where GemmOptions::kernel names it, never chosen otherwise.
};

struct DeviceInfo {
  std::string name;     ///< What Device::Open takes: "cpu".
  std::string backend;  ///< "cpu", "cuda", "metal".
  std::string model;    ///< Processor name.
  std::vector<std::string> features;
  int threads = 1;
  std::vector<KernelInfo> kernels;
  int64_t measured_products = 0;  ///< In the device's tuning table; rules choose for all others.
  std::string tuning_file;        ///< The user's part of it; empty: there is none.
};

/// Calls body(i) for i in [0, count), in any order and on any threads, and returns when all are
/// done. Hand one in to run on an existing thread pool.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

struct DeviceOptions {
  int threads = 0;                ///< CPU threads; 0 means all that this process may use.
  ParallelFor parallel_for = {};  ///< When set, no threads are made and this is called instead.
  /// What `metal-marlin tune` wrote: which kernel is the fastest for which product. Not set: the
  /// file that METAL_MARLIN_TUNING names, else metal-marlin/tuning.txt in the user's folder for
  /// configurations, where it is there. Empty, as is an empty variable: none.
  std::optional<std::string> tuning_file = {};
};

/// A handle to a device; copies share it. Every const call is thread-safe. Moving copies, so that a
/// Device is never empty. What was made for a device keeps it open: prepared weights, buffers and
/// models may outlive every handle.
class Device {
 public:
  class [[gnu::visibility("hidden")]] Impl;  // Else its members would be exported with Device.

  /// Opens "cpu", "cuda" (the current CUDA device), "cuda:0", "cuda:1", ..., "metal" (the GPU of a
  /// Mac), "metal-sim" (a simulator of it) or "auto". "auto" opens a CUDA device where this build
  /// has CUDA and a supported GPU is visible, else the CPU; Model::Open goes on to the CPU when
  /// that GPU cannot run the model. On the CPU the environment variable
  /// MARLIN_CPU=scalar|avx2|avx512|amx|neon forces a level. Errors: kInvalidArgument for an unknown
  /// name, kUnsupported for a level that this processor lacks and for a device that is not there,
  /// kIo and kMalformedFile for a tuning file that cannot be read, kOutOfMemory when the system
  /// starts fewer than the threads asked for: a device never runs with fewer than it says.
  static Result<Device> Open(std::string_view name, const DeviceOptions& options = {});

  DeviceInfo info() const;

  /// Waits for everything that was started on the stream (null: the device's default one) and says
  /// whether it worked; at once on the CPU. Errors: kDeviceLost when a kernel failed, after which
  /// every call on the device fails.
  Status Synchronize(void* stream = nullptr) const;
  Impl& impl() const { return *impl_; }
  const std::shared_ptr<Impl>& shared() const { return impl_; }
  explicit Device(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Device(const Device&) = default;
  Device& operator=(const Device&) = default;
  ~Device() = default;

 private:
  std::shared_ptr<Impl> impl_;
};

/// The device that a program takes where its user names none: METAL_MARLIN_DEVICE, else "auto".
/// Errors: kInvalidArgument naming the variable for a name that Device::Open does not know.
Result<std::string> DefaultDeviceName();

/// One line for people: "cpu (AMD EPYC 9B14, 2 threads)", "cuda:0 (NVIDIA H200)".
std::string DescribeDevice(const DeviceInfo& info);

/// Memory that a device's kernels read and write, for programs that do not want to deal with the
/// device's own interface. Move-only; frees on destruction, which on a GPU waits for the device.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Uninitialised bytes, aligned to 64 or more. Errors: kInvalidArgument for a negative size,
  /// kOutOfMemory.
  static Result<DeviceBuffer> Allocate(const Device& device, int64_t bytes);

  /// In the device's address space; what TensorView takes.
  void* data() const { return data_.get(); }
  /// 0 of a buffer that was moved from.
  int64_t bytes() const { return data_ == nullptr ? 0 : bytes_; }

  /// Copies [offset, offset + bytes) from or to the host and waits. Errors: kInvalidArgument for a
  /// range outside of the buffer or null host memory, kDeviceLost.
  Status CopyFrom(const void* host, int64_t bytes, int64_t offset = 0) const;
  Status CopyTo(void* host, int64_t bytes, int64_t offset = 0) const;

 private:
  struct Free {
    std::shared_ptr<Device::Impl> device;
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  int64_t bytes_ = 0;
};

/// Every device of this machine.
std::vector<DeviceInfo> ListDevices();

}  // namespace marlin
#pragma GCC visibility pop
