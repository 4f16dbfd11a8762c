#include "core.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string_view>
#include <type_traits>

#include "base/errors.h"
#include "base/view_checks.h"
#include "element_types.h"

namespace marlin::python {
namespace {

DType TypeOf(const char* name, const nb::dlpack::dtype& dtype) {
  const ElementType* const known = FindElementType(dtype);
  if (known != nullptr) return known->type;
  Refuse(fmt::format("{}: an element type that is not supported", name));
}

void CheckRank(const char* name, size_t rank) {
  if (rank <= static_cast<size_t>(kMaxRank)) return;
  Refuse(fmt::format("{}: {} dimensions, at most {} are supported", name, rank, kMaxRank));
}

template <typename View, typename Source>
View MakeView(const char* name, const Source& array) {
  CheckRank(name, array.ndim());
  Shape shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.Append(static_cast<int64_t>(array.shape(i)));
  View view(array.data(), TypeOf(name, array.dtype()), shape);
  for (size_t i = 0; i < array.ndim(); ++i) view.set_stride(static_cast<int>(i), array.stride(i));
  return view;
}

/// Whether a device's kernels can access memory of a place.
bool Reaches(const Place& device, const Place& memory) {
  if (memory.type == nb::device::cuda_managed::value) return true;
  if (device.type == nb::device::cpu::value) {
    return memory.type == nb::device::cpu::value || memory.type == nb::device::cuda_host::value;
  }
  return memory.type == device.type && memory.index == device.index;
}

template <typename View, typename Source>
Operand<View, Source> MakeOperand(const char* name, nb::handle object, const OpenDevice& device) {
  if (nb::isinstance<ArrayView>(object)) {
    const auto& known = nb::cast<const ArrayView&>(object);
    CheckPlace(name, known.place(), device);
    return {known.view(), Source()};
  }
  Source array;
  if (!nb::try_cast(object, array) || !array.is_valid()) {
    constexpr bool kWritable = std::is_same_v<View, MutableTensorView>;
    Refuse(fmt::format("{}: expected {} array, got {}", name, kWritable ? "a writable" : "an",
                       nb::type_name(object.type()).c_str()));
  }
  CheckPlace(name, {array.device_type(), array.device_id()}, device);
  const View view = MakeView<View>(name, array);
  return {view, std::move(array)};
}

}  // namespace

void Refuse(const std::string& message) { throw StatusError(Invalid(message)); }

const char* ErrorClassName(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "InvalidArgumentError";
    case Code::kUnsupported:
      return "UnsupportedError";
    case Code::kMalformedFile:
      return "MalformedFileError";
    case Code::kNonFiniteInput:
      return "NonFiniteInputError";
    case Code::kIo:
      return "FileError";
    case Code::kOutOfMemory:
      return "OutOfMemoryError";
    case Code::kDeviceLost:
      return "DeviceLostError";
    default:
      return "MarlinError";
  }
}

std::string Place::ToString() const {
  switch (type) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value:
      return "cpu";
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value:
      return fmt::format("cuda:{}", index);
    case nb::device::metal::value:
      return "metal";
    default:
      return fmt::format("a device of DLPack type {}", type);
  }
}

OpenDevice::OpenDevice(Device opened) : device(std::move(opened)), name(device.info().name) {
  constexpr std::string_view kCuda = "cuda:";
  if (!name.starts_with(kCuda)) return;
  place.type = nb::device::cuda::value;
  std::from_chars(name.data() + kCuda.size(), name.data() + name.size(), place.index);
}

ArrayView::ArrayView(nb::object owner, uintptr_t data, const std::string& dtype,
                     const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                     const std::string& device, int index)
    : owner_(std::move(owner)) {
  const ElementType* const known = FindElementType(dtype);
  if (known == nullptr) {
    Refuse(fmt::format("array: element type {} is not supported", dtype));
  }
  CheckRank("array", shape.size());
  if (strides.size() != shape.size()) {
    Refuse(fmt::format("array: {} dimensions but {} strides", shape.size(), strides.size()));
  }
  Shape dims;
  for (const int64_t dim : shape) dims.Append(dim);
  view_ = MutableTensorView(reinterpret_cast<void*>(data), known->type, dims);
  for (size_t i = 0; i < strides.size(); ++i) view_.set_stride(static_cast<int>(i), strides[i]);
  if (device == "cuda") {
    place_ = {nb::device::cuda::value, index};
  } else if (device != "cpu") {
    Refuse(fmt::format("array: on {}, which no device can access", device));
  }
}

void CheckPlace(const char* name, const Place& memory, const OpenDevice& device) {
  if (Reaches(device.place, memory)) return;
  Refuse(fmt::format("{}: expected an array on {}, got one on {}", name, device.name,
                     memory.ToString()));
}

Input InputOf(const char* name, nb::handle object, const OpenDevice& device) {
  return MakeOperand<TensorView, nb::ndarray<nb::ro>>(name, object, device);
}

Output OutputOf(const char* name, nb::handle object, const OpenDevice& device) {
  return MakeOperand<MutableTensorView, nb::ndarray<>>(name, object, device);
}

TensorView ViewOf(const char* name, const Array& array) {
  return MakeView<TensorView>(name, array);
}

MutableTensorView ViewOf(const char* name, const MutableArray& array) {
  return MakeView<MutableTensorView>(name, array);
}

nb::object ToNumPy(const TensorView& view, nb::handle owner) {
  size_t shape[kMaxRank];
  int64_t strides[kMaxRank];
  for (int i = 0; i < view.rank(); ++i) {
    shape[i] = static_cast<size_t>(view.dim(i));
    strides[i] = view.stride(i);
  }
  using Result = nb::ndarray<nb::numpy, nb::ro>;
  return nb::cast(Result(view.data(), static_cast<size_t>(view.rank()), shape, owner, strides,
                         NumPyType(view.dtype())));
}

DType ParseFloatType(const char* what, std::string_view name) {
  const ElementType* const known = FindElementType(name);
  if (known != nullptr && IsFloat(known->type)) return known->type;
  Refuse(fmt::format("{}: expected float32, float16 or bfloat16, got {}", what, name));
}

std::string PathOf(const char* name, nb::handle object) {
  nb::object path = nb::steal(PyOS_FSPath(object.ptr()));
  if (path.is_valid() && nb::isinstance<nb::str>(path)) {
    path = nb::steal(PyUnicode_EncodeFSDefault(path.ptr()));
  }
  if (!path.is_valid()) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 &&
        PyErr_ExceptionMatches(PyExc_UnicodeError) == 0) {
      throw nb::python_error();
    }
    PyErr_Clear();
    Refuse(fmt::format("{}: expected a path of str, bytes or os.PathLike, got {}", name,
                       nb::type_name(object.type()).c_str()));
  }
  const auto bytes = nb::cast<nb::bytes>(path);
  return {bytes.c_str(), bytes.size()};
}

nb::str PathObject(const std::string& path) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

nb::str TextObject(std::string_view text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::object ErrorObject(Code code, std::string message) {
  // Names from files and tensors may contain anything.
  const auto breaks = [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) == 0x7f;
  };
  std::replace_if(message.begin(), message.end(), breaks, '?');
  return nb::module_::import_("metal_marlin.errors")
      .attr(ErrorClassName(code))(TextObject(message));
}

nb::object DocumentObject(const nlohmann::ordered_json& document) {
  // A name from a file may be invalid UTF-8.
  return DocumentObject(
      document.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

nb::object DocumentObject(const std::string& text) {
  return nb::module_::import_("json").attr("loads")(TextObject(text));
}

nb::dict SamplingDict(const SamplingOptions& sampling) {
  nb::dict dict;
  dict["temperature"] = sampling.temperature;
  dict["top_k"] = sampling.top_k;
  dict["top_p"] = sampling.top_p;
  dict["min_p"] = sampling.min_p;
  dict["repetition_penalty"] = sampling.repetition_penalty;
  return dict;
}

std::string TextOf(nb::handle object) {
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(nb::str(object).ptr(), "utf-8", "replace"));
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return "an error that has no text";
  }
  const auto text = nb::cast<nb::bytes>(bytes);
  return {text.c_str(), text.size()};
}

}  // namespace marlin::python
