// A guarded buffer in device memory: the operands that a kernel reads and the output it leaves.
#pragma once

#include <cstdint>
#include <string>

#include "guarded_buffer.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin::conformance {

/// The bytes of a GuardedBuffer, guards included, at the same alignment in device memory. The CPU
/// gets a copy as well, except under ASan: there the kernels use the buffer itself, whose end ASan
/// knows.
class DeviceImage {
 public:
  /// Empty: null data.
  DeviceImage() = default;
  /// Allocates and uploads. Errors: those of DeviceBuffer.
  static Result<DeviceImage> Make(const Device& device, GuardedBuffer host);

  /// Pointer in the device's address space.
  void* data() const;
  /// The bytes last uploaded or downloaded.
  const GuardedBuffer& host() const { return host_; }

  /// Poisons the data on the host and the device.
  Status Poison();
  /// Copies the device's memory to host().
  Status Download();
  /// Copies the guards alone.
  Status DownloadGuards();
  /// Whether the device's memory differs from host().
  Result<bool> Changed() const;

 private:
  bool in_place() const { return memory_.data() == nullptr; }

  std::string backend_;
  GuardedBuffer host_;
  DeviceBuffer memory_;
  uint64_t hash_ = 0;  ///< Hash of the original image; used for memory in place.
};

}  // namespace marlin::conformance
