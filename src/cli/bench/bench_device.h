// The device that a command of bench measures.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/thread_pool.h"
#include "cli/bench/bench_arguments.h"
#include "marlin/device.h"

namespace marlin::cli {

/// A device on a pool of threads that the probes of its ceilings use too: two pools would spin
/// against each other.
class BenchDevice {
 public:
  /// Takes the name of the device, and opens it if that is "auto": other options depend on what it
  /// is. Errors: kUnsupported for a device without times, as Device::Open.
  static Result<std::unique_ptr<BenchDevice>> Find(const BenchArguments& arguments);

  /// Opens a named device, after all other options are read, so that their errors come first.
  Status Open();

  /// The name as given; for "auto" the name of the device that was opened.
  const std::string& name() const { return name_; }
  bool is_cuda() const { return name_.starts_with("cuda"); }
  /// Weights of this many bytes come from memory, not from a cache.
  int64_t beyond_cache_bytes() const;
  /// Precondition: Open.
  const Device& device() const { return *device_; }
  /// The options that the device was opened with, for a second one.
  const DeviceOptions& options() const { return options_; }
  ThreadPool& pool() { return pool_; }

 private:
  explicit BenchDevice(const BenchArguments& arguments);

  const DeviceArgument& argument_;
  std::string name_;
  ThreadPool pool_;
  DeviceOptions options_;
  std::optional<Device> device_;
};

}  // namespace marlin::cli
