// What the parts of the extension share: arrays as views, errors as exceptions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin::python {

namespace nb = nanobind;

/// Any array in CPU memory that speaks DLPack or the buffer protocol.
using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using MutableArray = nb::ndarray<nb::device::cpu>;

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

void BindErrors(nb::module_& module);
void BindWeights(nb::module_& module);
void BindProducts(nb::module_& module);
void BindCheckpoints(nb::module_& module);
void BindModels(nb::module_& module);
void BindCommand(nb::module_& module);

}  // namespace marlin::python
