// Devices: they hold prepared weights and run GEMMs and decoder operations.
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
  std::string reason;         ///< Why it is not available; empty otherwise.
  bool only_by_name = false;  ///< Never selected; runs only when GemmOptions::kernel names it.
};

/// A decoder operation that the host has run in the memory that it shares with a device.
struct HostOperation {
  std::string name;         ///< "RMS norm".
  int64_t calls = 0;        ///< Since the device was opened.
  bool has_kernel = false;  ///< The device has a kernel, which does not take these calls.
};

/// Properties of a device.
struct DeviceInfo {
  std::string name;     ///< Argument of Device::Open: "cpu".
  std::string backend;  ///< "cpu", "cuda", "metal".
  std::string model;    ///< Processor name.
  std::vector<std::string> features;
  int threads = 1;
  std::vector<KernelInfo> kernels;
  int64_t measured_products = 0;  ///< Entries of the tuning table; costs decide the rest.
  std::string tuning_file;        ///< The user's tuning file; empty if none is loaded.
  /// Opened as "auto": why the devices before this one were not; empty if there are none.
  std::string passed_over;
  std::vector<HostOperation> host_operations;  ///< Empty where the device runs all of them.
};

/// Calls body(i) for i in [0, count), in any order and on any threads, and returns when all calls
/// have returned. Pass one to run on an existing thread pool.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

/// Options of Device::Open.
struct DeviceOptions {
  int threads = 0;                ///< CPU threads; 0 means all that this process may use.
  ParallelFor parallel_for = {};  ///< If set, the device starts no threads and calls this instead.
  /// A file written by `metal-marlin tune`: the fastest measured kernel for each GEMM shape. Unset:
  /// the file named by METAL_MARLIN_TUNING, otherwise metal-marlin/tuning.txt in XDG_CONFIG_HOME or
  /// ~/.config if it exists. An empty string, or an empty variable, means none.
  std::optional<std::string> tuning_file = {};
};

/// A handle to a device; copies share it. Every const call is thread-safe. Moving copies, so that a
/// Device is never empty. Prepared weights, buffers and models keep their device open and may
/// outlive every handle.
class Device {
 public:
  class [[gnu::visibility("hidden")]] Impl;  // Hidden: members would be exported with Device.

  /// Opens "cpu", "cuda" (the current CUDA device), "cuda:0", "cuda:1", ..., "metal" (an Apple
  /// GPU), "metal-sim" (its simulator) or "auto": a CUDA device if this build has CUDA and a
  /// supported GPU is visible, on a Mac its GPU, otherwise the CPU. Model::Open falls back to the
  /// CPU for a device opened as "auto" that cannot run the model, or leaves a part of it to the
  /// CPU, which alone is faster. The environment variable METAL_MARLIN_CPU (scalar, avx2, avx512,
  /// amx or neon) forces an instruction set of the CPU. Errors: kInvalidArgument for an unknown
  /// name; kUnsupported for an instruction set that the processor lacks and for a device that is
  /// not present; kIo and kMalformedFile for an unreadable tuning file; kOutOfMemory when the
  /// system cannot start all requested threads: a device never runs with fewer than it reports.
  static Result<Device> Open(std::string_view name, const DeviceOptions& options = {});

  /// The device's properties and kernels.
  DeviceInfo info() const;

  /// Waits for all work on the stream (null: the device's default stream) and returns its status;
  /// returns at once on the CPU. Errors: kDeviceLost when a kernel failed, after which every call
  /// on the device fails; kInvalidArgument and kNonFiniteInput for ids, positions and logits that
  /// an operation found invalid.
  Status Synchronize(void* stream = nullptr) const;
  Device(const Device&) = default;
  Device& operator=(const Device&) = default;
  ~Device() = default;
  /// Whether both are handles to what one Open returned.
  friend bool operator==(const Device& a, const Device& b) { return a.impl_ == b.impl_; }

 private:
  friend struct Internals;
  explicit Device(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

/// The device that a program opens unless its user names one: METAL_MARLIN_DEVICE, otherwise
/// "auto". Errors: kInvalidArgument naming the variable for a name that Device::Open does not know.
Result<std::string> DefaultDeviceName();

/// One line for people: "cpu (AMD EPYC 9B14, 2 threads)", "cuda:0 (NVIDIA H200)".
std::string DescribeDevice(const DeviceInfo& info);

/// Device memory, for programs that do not use the device's native API. Move-only; the destructor
/// frees the memory, and on a GPU waits for the device first.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Allocates uninitialized memory aligned to at least 64 bytes. Errors: kInvalidArgument for a
  /// negative size, kOutOfMemory.
  static Result<DeviceBuffer> Allocate(const Device& device, int64_t bytes);

  /// The address in the device's address space, as TensorView expects it.
  void* data() const { return data_.get(); }
  /// The size in bytes; 0 for a moved-from buffer.
  int64_t bytes() const { return data_ == nullptr ? 0 : bytes_; }

  /// Copies [offset, offset + bytes) of the buffer from or to host memory, synchronously. Errors:
  /// kInvalidArgument for a range outside of the buffer or null host memory, kDeviceLost.
  Status CopyFrom(const void* host, int64_t bytes, int64_t offset = 0) const;
  Status CopyTo(void* host, int64_t bytes, int64_t offset = 0) const;

  /// The same copies, enqueued after the work on a stream (null: the device's default stream). The
  /// caller keeps the host memory alive, leaves a source unchanged and a destination unread until
  /// Synchronize(stream) has returned. The CPU copies at once, Metal after waiting for the stream;
  /// CUDA may also wait if the host memory is pageable: only copies of page-locked memory overlap
  /// other work. Errors: as CopyFrom and CopyTo, for the range and null host memory before anything
  /// is enqueued; the copy's own may come from Synchronize.
  Status CopyFromAsync(const void* host, int64_t bytes, int64_t offset = 0,
                       void* stream = nullptr) const;
  Status CopyToAsync(void* host, int64_t bytes, int64_t offset = 0, void* stream = nullptr) const;

 private:
  struct Free {
    std::shared_ptr<Device::Impl> device;
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  int64_t bytes_ = 0;
};

/// Every device of this machine; the simulator is not listed. Apple's GPU is not tested, as it is
/// when it is opened. `refused`, if not null, receives the errors of GPUs that are there and cannot
/// be opened, such as those that this build has no code for.
std::vector<DeviceInfo> ListDevices(std::vector<Status>* refused = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
