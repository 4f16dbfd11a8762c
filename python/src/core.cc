#include "core.h"

#include <fmt/format.h>

#include "base/checked.h"

namespace marlin::python {
namespace {

DType TypeOf(const char* name, const nb::dlpack::dtype& dtype) {
  struct Known {
    nb::dlpack::dtype_code code;
    uint8_t bits;
    DType type;
  };
  using Code = nb::dlpack::dtype_code;
  constexpr Known kKnown[] = {
      {Code::Float, 32, DType::kF32},   {Code::Float, 16, DType::kF16},
      {Code::Bfloat, 16, DType::kBf16}, {Code::Int, 32, DType::kI32},
      {Code::UInt, 32, DType::kU32},    {Code::UInt, 8, DType::kU8},
      {Code::Float, 64, DType::kF64},   {Code::Int, 64, DType::kI64},
  };
  for (const Known& known : kKnown) {
    if (dtype.code == static_cast<uint8_t>(known.code) && dtype.bits == known.bits &&
        dtype.lanes == 1) {
      return known.type;
    }
  }
  throw StatusError(Status(marlin::Code::kInvalidArgument,
                           fmt::format("{}: an element type that is not supported", name)));
}

template <typename View, typename Source>
View MakeView(const char* name, const Source& array) {
  if (array.ndim() > static_cast<size_t>(kMaxRank)) {
    throw StatusError(Status(
        Code::kInvalidArgument,
        fmt::format("{}: {} dimensions, at most {} are supported", name, array.ndim(), kMaxRank)));
  }
  Shape shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.Append(static_cast<int64_t>(array.shape(i)));
  View view(array.data(), TypeOf(name, array.dtype()), shape);
  for (size_t i = 0; i < array.ndim(); ++i) view.set_stride(static_cast<int>(i), array.stride(i));
  return view;
}

nb::dlpack::dtype DlpackType(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto make = [](Code code, int bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (dtype) {
    case DType::kF32:
      return make(Code::Float, 32);
    case DType::kF16:
      return make(Code::Float, 16);
    case DType::kU32:
      return make(Code::UInt, 32);
    case DType::kBf16:
      return make(Code::UInt, 16);  // NumPy has no bfloat16: the bits.
    default:
      return make(Code::UInt, 8);
  }
}

const char* ClassName(Code code) {
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

}  // namespace

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
                         DlpackType(view.dtype())));
}

void BindErrors(nb::module_& /*module*/) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      const nb::object type =
          nb::module_::import_("metal_marlin.errors").attr(ClassName(error.code()));
      PyErr_SetString(type.ptr(), error.what());
    }
  });
}

}  // namespace marlin::python

NB_MODULE(_core, module) {
  namespace python = marlin::python;
  // Frameworks keep modules alive past the interpreter; users should not read about it.
  nanobind::set_leak_warnings(false);
  module.doc() = "The C++ core of metal_marlin.";
  python::BindErrors(module);
  python::BindWeights(module);
  python::BindProducts(module);
  python::BindCheckpoints(module);
  python::BindModels(module);
  python::BindCommand(module);
}
