// The element types of arrays: the names that frameworks give them, and how DLPack encodes them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "marlin/tensor.h"

namespace marlin::python {

struct ElementType {
  DType type;
  std::string_view name;  ///< As NumPy, PyTorch and MLX write it: "bfloat16".
  nanobind::dlpack::dtype_code code;
  uint8_t bits;
  /// NumPy has no such type: it holds the bits, as unsigned integers.
  bool only_bits = false;
};

/// All element types that arrays may have.
std::span<const ElementType> AllElementTypes();
/// The element type of a name, or null.
const ElementType* FindElementType(std::string_view name);
/// The element type that an array's DLPack type stands for, or null.
const ElementType* FindElementType(const nanobind::dlpack::dtype& dtype);
/// The DLPack type of a NumPy array over elements of a type; bytes for types that no array has.
nanobind::dlpack::dtype NumPyType(DType type);

}  // namespace marlin::python
