// What the parts of the extension share: arrays as views, errors as exceptions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin::python {

namespace nb = nanobind;

/// Any array in CPU memory that speaks DLPack or the buffer protocol.
using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using MutableArray = nb::ndarray<nb::device::cpu>;

/// Where memory is, in DLPack's numbers.
struct Place {
  int type = nb::device::cpu::value;
  int index = 0;
  /// "cpu", "cuda:0", ...
  std::string ToString() const;
};

/// A device and where its memory is.
struct OpenDevice {
  explicit OpenDevice(Device opened);
  Device device;
  std::string name;  ///< "cpu", "cuda:0", ...
  Place place;
};

/// An array as its framework describes it, for frameworks whose DLPack calls cost more than a
/// product or refuse what is not on the current device. Keeps its owner, and so its memory, alive.
class ArrayView {
 public:
  ArrayView(nb::object owner, uintptr_t data, const std::string& dtype,
            const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
            const std::string& device, int index);
  const MutableTensorView& view() const { return view_; }
  const Place& place() const { return place_; }

 private:
  nb::object owner_;
  MutableTensorView view_;
  Place place_;
};

/// An argument of a product: the view, and what keeps an array's memory alive.
template <typename View, typename Source>
struct Operand {
  View view;
  Source array;
};
using Input = Operand<TensorView, nb::ndarray<nb::ro>>;
using Output = Operand<MutableTensorView, nb::ndarray<>>;

/// The view of an ArrayView, or of an array that speaks DLPack or the buffer protocol; `object`
/// must outlive it. Throws StatusError for what is neither, for an element type that is none of
/// ours, and for memory that is not the device's.
Input InputOf(const char* name, nb::handle object, const OpenDevice& device);
Output OutputOf(const char* name, nb::handle object, const OpenDevice& device);

/// A Status on its way to the exception of its code.
class StatusError : public std::runtime_error {
 public:
  explicit StatusError(const Status& status)
      : std::runtime_error(std::string(status.message())), code_(status.code()) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

inline void Check(const Status& status) {
  if (!status.ok()) throw StatusError(status);
}
template <typename T>
T Take(Result<T> result) {
  Check(result.status());
  return *std::move(result);
}

/// Strides and all; throws StatusError for an element type that is none of ours.
TensorView ViewOf(const char* name, const Array& array);
MutableTensorView ViewOf(const char* name, const MutableArray& array);

/// A read-only NumPy array of a view; `owner` keeps the memory alive.
nb::object ToNumPy(const TensorView& view, nb::handle owner);

/// "float32", "float16" or "bfloat16"; throws StatusError for other names, and for those of unknown
/// activations.
DType ParseFloatType(const char* what, const std::string& name);
Activation ParseActivation(const std::string& name);

/// A path as the system takes it: bytes of str (as os.fsencode), bytes or os.PathLike. Throws
/// StatusError naming the argument for anything else.
std::string PathOf(const char* name, nb::handle object);
/// A path as os.fsdecode gives it back.
nb::str PathObject(const std::string& path);
/// Text for people, whatever bytes it has: what is no UTF-8 becomes U+FFFD.
nb::str TextObject(std::string_view text);
/// Text of Python as UTF-8; a lone surrogate becomes '?'.
std::string TextOf(nb::handle object);

/// An exception of a caller's callback on its way through the library, which knows none: Run lets
/// the library see that the call has failed, Rethrow gives the exception back afterwards.
class CallbackError {
 public:
  template <typename Body>
  void Run(Body body) {
    const nb::gil_scoped_acquire held;
    try {
      // Ctrl-C, too, while the library runs.
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      body();
    } catch (...) {
      error_ = std::current_exception();
      throw Stopped();
    }
  }
  void Rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct Stopped : std::exception {
    const char* what() const noexcept override { return "the callback raised an exception"; }
  };
  std::exception_ptr error_;
};

void BindErrors(nb::module_& module);
void BindWeights(nb::module_& module);
void BindProducts(nb::module_& module);
void BindMetal(nb::module_& module);
void BindCheckpoints(nb::module_& module);
void BindModels(nb::module_& module);
void BindDecoder(nb::module_& module);
void BindCommand(nb::module_& module);

}  // namespace marlin::python
