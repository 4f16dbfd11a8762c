// Arrays as operands of a device's calls, and memory for these calls.
#pragma once

#include <cstdint>
#include <utility>

#include "core.h"
#include "marlin/device.h"

namespace marlin::python {

/// An input that the device can read: the array itself, or a copy in device memory.
class DeviceInput {
 public:
  DeviceInput() = default;
  /// Copies an array in host memory (NumPy, MLX) if the device cannot read that; a tensor of
  /// PyTorch is never copied, because its device was the caller's decision. `object` must outlive
  /// the input. Throws StatusError as InputOf.
  DeviceInput(const char* name, nb::handle object, const OpenDevice& on);
  const TensorView& view() const { return view_; }

 private:
  Input array_;
  DeviceBuffer copy_;
  TensorView view_;
};

/// The same for an output, which must be contiguous to be copied.
class DeviceOutput {
 public:
  DeviceOutput(const char* name, nb::handle object, const OpenDevice& on);
  const MutableTensorView& view() const { return view_; }
  /// Waits for the stream and copies the result to the host, if the array is there and the device
  /// cannot write it.
  Status Finish(const OpenDevice& on, void* stream) const;

 private:
  Output array_;
  MutableArray host_;
  DeviceBuffer copy_;
  MutableTensorView view_;
};

/// Device memory for one call, from a framework's allocator.
class Scratch {
 public:
  /// Calls allocate(bytes), which returns an array of that size on the device; no call for 0.
  Scratch(nb::handle allocate, int64_t bytes, const OpenDevice& on);
  void* data() const { return memory_.view.data(); }
  int64_t bytes() const { return data() == nullptr ? 0 : memory_.view.ByteCount(); }

 private:
  nb::object owner_;
  Output memory_;
};

}  // namespace marlin::python
