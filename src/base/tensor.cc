#include "marlin/tensor.h"

#include <iterator>

namespace marlin {
namespace {

struct DTypeInfo {
  std::string_view name;
  int64_t bytes;
};
// In the order of DType.
constexpr DTypeInfo kDTypes[] = {
    {"bool", 1}, {"u8", 1},  {"i8", 1},  {"f8_e4m3", 1}, {"f8_e5m2", 1}, {"f8_e8m0", 1},
    {"i16", 2},  {"u16", 2}, {"f16", 2}, {"bf16", 2},    {"i32", 4},     {"u32", 4},
    {"f32", 4},  {"i64", 8}, {"u64", 8}, {"f64", 8},
};

}  // namespace

int64_t DTypeBytes(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(kDTypes) ? kDTypes[index].bytes : 0;
}

std::string_view DTypeName(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(kDTypes) ? kDTypes[index].name : "unknown";
}

std::string Shape::ToString() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string((*this)[i]);
  }
  return text + "]";
}

}  // namespace marlin
