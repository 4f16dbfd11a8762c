// Shared by the parts of the extension: arrays as views, errors as exceptions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <exception>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "marlin/device.h"
#include "marlin/sampling.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin::python {

namespace nb = nanobind;

/// Any array in CPU memory that supports DLPack or the buffer protocol.
using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using MutableArray = nb::ndarray<nb::device::cpu>;

/// A memory location as DLPack's device type and index.
struct Place {
  int type = nb::device::cpu::value;
  int index = 0;
  /// "cpu", "cuda:0", ...
  std::string ToString() const;
};

/// A device and its memory location.
struct OpenDevice {
  explicit OpenDevice(Device opened);
  Device device;
  std::string name;  ///< "cpu", "cuda:0", ...
  Place place;
};

/// An array described by its framework, for frameworks whose DLPack export costs more than a GEMM
/// or rejects arrays that are not on the current device. Keeps its owner, and so its memory, alive.
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

/// An operand: its view, and the array that keeps the memory alive.
template <typename View, typename Source>
struct Operand {
  View view;
  Source array;
};
using Input = Operand<TensorView, nb::ndarray<nb::ro>>;
using Output = Operand<MutableTensorView, nb::ndarray<>>;

/// Throws StatusError, naming the operand, for memory that the device cannot access.
void CheckPlace(const char* name, const Place& memory, const OpenDevice& device);

/// The view of an ArrayView, or of an array that supports DLPack or the buffer protocol; `object`
/// must outlive it. Throws StatusError for anything else, for an unsupported element type, and for
/// memory that the device cannot access.
Input InputOf(const char* name, nb::handle object, const OpenDevice& device);
Output OutputOf(const char* name, nb::handle object, const OpenDevice& device);

/// Carries a Status to the Python exception of its code.
class StatusError : public std::runtime_error {
 public:
  explicit StatusError(const Status& status)
      : std::runtime_error(std::string(status.message())), code_(status.code()) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

/// Throws kInvalidArgument with a one-line message that names the argument.
[[noreturn]] void Refuse(const std::string& message);
inline void Check(const Status& status) {
  if (!status.ok()) throw StatusError(status);
}
template <typename T>
T Take(Result<T> result) {
  Check(result.status());
  return *std::move(result);
}

/// Keeps strides; throws StatusError for an unsupported element type.
TensorView ViewOf(const char* name, const Array& array);
MutableTensorView ViewOf(const char* name, const MutableArray& array);

/// A read-only NumPy array over a view; `owner` keeps the memory alive.
nb::object ToNumPy(const TensorView& view, nb::handle owner);

/// "float32", "float16" or "bfloat16". Throws StatusError for other names.
DType ParseFloatType(const char* what, std::string_view name);

/// A path in the system's encoding: the bytes of str (as os.fsencode), bytes or os.PathLike. Throws
/// StatusError naming the argument for anything else.
std::string PathOf(const char* name, nb::handle object);
/// A path decoded like os.fsdecode.
nb::str PathObject(const std::string& path);
/// Text for people from arbitrary bytes: invalid UTF-8 becomes U+FFFD.
nb::str TextObject(std::string_view text);
/// The class of metal_marlin.errors for an error.
const char* ErrorClassName(Code code);
/// An exception of that class, with the message in one line.
nb::object ErrorObject(Code code, std::string message);
/// A document of the command as the dict that json.loads makes of it.
nb::object DocumentObject(const nlohmann::ordered_json& document);
nb::object DocumentObject(const std::string& text);
/// Python text as UTF-8; a lone surrogate becomes '?'.
std::string TextOf(nb::handle object);

/// The options that generation_config.json can set.
nb::dict SamplingDict(const SamplingOptions& sampling);

/// Carries an exception of a Python callback through the library, which knows none: Run makes the
/// library see a failed callback, Rethrow throws the original exception afterwards.
class CallbackError {
 public:
  template <typename Body>
  void Run(Body body) {
    const nb::gil_scoped_acquire held;
    try {
      // Also handle Ctrl-C while the library runs.
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

}  // namespace marlin::python
