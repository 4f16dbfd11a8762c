#include "device_arrays.h"

#include <fmt/core.h>

namespace marlin::python {
namespace {

/// Whether an object is an array in host memory that the device cannot access. ArrayView is how
/// PyTorch's tensors arrive.
template <typename HostArray>
bool IsElsewhere(nb::handle object, const OpenDevice& on, HostArray* array) {
  if (on.place.type == nb::device::cpu::value || nb::isinstance<ArrayView>(object)) return false;
  return nb::try_cast(object, *array) && array->is_valid();
}

/// The bytes from the first element of a view to the end of its last one.
int64_t SpanBytes(const char* name, const TensorView& view) {
  if (view.shape().ElementCount() == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < view.rank(); ++i) {
    if (view.stride(i) < 0) {
      Refuse(fmt::format("{}: negative strides are not supported", name));
    }
    last += (view.dim(i) - 1) * view.stride(i);
  }
  return (last + 1) * DTypeBytes(view.dtype());
}

/// A view of other memory with the type, shape and strides of a view.
template <typename View, typename Pointer>
View Relocated(const TensorView& view, Pointer data) {
  View moved(data, view.dtype(), view.shape());
  for (int i = 0; i < view.rank(); ++i) moved.set_stride(i, view.stride(i));
  return moved;
}

}  // namespace

DeviceInput::DeviceInput(const char* name, nb::handle object, const OpenDevice& on) {
  Array host;
  if (!IsElsewhere(object, on, &host)) {
    array_ = InputOf(name, object, on);
    view_ = array_.view;
    return;
  }
  const TensorView source = ViewOf(name, host);
  const int64_t bytes = SpanBytes(name, source);
  copy_ = Take(DeviceBuffer::Allocate(on.device, bytes));
  if (bytes > 0) Check(copy_.CopyFrom(source.data(), bytes));
  view_ = Relocated<TensorView>(source, copy_.data());
}

DeviceOutput::DeviceOutput(const char* name, nb::handle object, const OpenDevice& on) {
  if (!IsElsewhere(object, on, &host_)) {
    host_ = {};
    array_ = OutputOf(name, object, on);
    view_ = array_.view;
    return;
  }
  const MutableTensorView target = ViewOf(name, host_);
  if (target.ByteCount() > 0 && !target.IsContiguous()) {
    Refuse(fmt::format("{}: expected a contiguous array on the host", name));
  }
  copy_ = Take(DeviceBuffer::Allocate(on.device, target.ByteCount()));
  view_ = Relocated<MutableTensorView>(target, copy_.data());
}

Status DeviceOutput::Finish(const OpenDevice& on, void* stream) const {
  if (!host_.is_valid()) return {};
  Status status = on.device.Synchronize(stream);
  if (!status.ok() || copy_.bytes() == 0) return status;
  return copy_.CopyTo(host_.data(), copy_.bytes());
}

Scratch::Scratch(nb::handle allocate, int64_t bytes, const OpenDevice& on) {
  if (bytes <= 0) return;
  owner_ = allocate(bytes);
  memory_ = OutputOf("workspace", owner_, on);
}

}  // namespace marlin::python
