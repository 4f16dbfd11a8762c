// A guarded buffer in the memory of a device: what a kernel gets, and what it leaves there.
#pragma once

#include <cstdint>
#include <string>

#include "guarded_buffer.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin::conformance {

/// The bytes of a GuardedBuffer, guards included, at the same alignment in a device's memory. On
/// the CPU too, except under ASan: there the kernels get the buffer itself, whose end ASan knows.
class DeviceImage {
 public:
  /// Nothing: null data.
  DeviceImage() = default;
  /// Allocates and uploads. Errors: those of DeviceBuffer.
  static Result<DeviceImage> Make(const Device& device, GuardedBuffer host);

  /// In the device's address space.
  void* data() const;
  /// What was uploaded or, since then, downloaded.
  const GuardedBuffer& host() const { return host_; }

  /// Poisons the data on both sides.
  Status Poison();
  /// Makes host() what the device's memory holds.
  Status Download();
  /// The same for the guards alone.
  Status DownloadGuards();
  /// Whether the device's memory differs from host().
  Result<bool> Changed() const;

 private:
  bool in_place() const { return memory_.data() == nullptr; }

  std::string backend_;
  GuardedBuffer host_;
  DeviceBuffer memory_;
  uint64_t hash_ = 0;  ///< Of the image as it was made; for memory in place.
};

}  // namespace marlin::conformance
