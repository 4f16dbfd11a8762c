#include "element_types.h"

#include <algorithm>
#include <iterator>

namespace marlin::python {
namespace {

using DlpackCode = nanobind::dlpack::dtype_code;

constexpr ElementType kElementTypes[] = {
    {DType::kF32, "float32", DlpackCode::Float, 32},
    {DType::kF16, "float16", DlpackCode::Float, 16},
    {DType::kBf16, "bfloat16", DlpackCode::Bfloat, 16, true},
    {DType::kF64, "float64", DlpackCode::Float, 64},
    {DType::kI64, "int64", DlpackCode::Int, 64},
    {DType::kI32, "int32", DlpackCode::Int, 32},
    {DType::kI8, "int8", DlpackCode::Int, 8},
    {DType::kU32, "uint32", DlpackCode::UInt, 32},
    {DType::kU16, "uint16", DlpackCode::UInt, 16},
    {DType::kU8, "uint8", DlpackCode::UInt, 8},
    // After uint8, because DLPack's readers see their bytes.
    {DType::kF8E4M3, "float8_e4m3fn", DlpackCode::UInt, 8, true},
    {DType::kF8E5M2, "float8_e5m2", DlpackCode::UInt, 8, true},
    {DType::kF8E8M0, "float8_e8m0fnu", DlpackCode::UInt, 8, true},
};

template <typename Matches>
const ElementType* FindIf(Matches matches) {
  const auto* const found =
      std::find_if(std::begin(kElementTypes), std::end(kElementTypes), matches);
  return found == std::end(kElementTypes) ? nullptr : found;
}

}  // namespace

std::span<const ElementType> AllElementTypes() { return kElementTypes; }

const ElementType* FindElementType(std::string_view name) {
  return FindIf([name](const ElementType& row) { return row.name == name; });
}

const ElementType* FindElementType(const nanobind::dlpack::dtype& dtype) {
  return FindIf([&dtype](const ElementType& row) {
    return dtype.code == static_cast<uint8_t>(row.code) && dtype.bits == row.bits &&
           dtype.lanes == 1;
  });
}

nanobind::dlpack::dtype NumPyType(DType type) {
  const ElementType* const row =
      FindIf([type](const ElementType& one) { return one.type == type; });
  const auto make = [](DlpackCode code, uint8_t bits) {
    return nanobind::dlpack::dtype{static_cast<uint8_t>(code), bits, 1};
  };
  if (row == nullptr) return make(DlpackCode::UInt, 8);
  return make(row->only_bits ? DlpackCode::UInt : row->code, row->bits);
}

}  // namespace marlin::python
