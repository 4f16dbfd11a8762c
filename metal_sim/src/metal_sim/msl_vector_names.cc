#include "metal_sim/msl_vector_names.h"

namespace metal_sim {
namespace {

/// `half4`, `uchar2`, `packed_float3`.
bool IsVectorName(std::string_view name) {
  if (name.starts_with("packed_")) name.remove_prefix(7);
  if (name.empty() || name.back() < '2' || name.back() > '4') return false;
  name.remove_suffix(1);
  constexpr std::string_view kScalars[] = {"bool", "char", "uchar", "short", "ushort", "int",
                                           "uint", "long", "ulong", "half",  "bfloat", "float"};
  for (const std::string_view scalar : kScalars) {
    if (name == scalar) return true;
  }
  return false;
}

}  // namespace

VectorNames::VectorNames(const MslSource& source) : source_(source) {
  for (size_t i = 0; i < source_.size(); ++i) AddAlias(i);
}

bool VectorNames::IsVector(size_t index) const {
  const std::string_view name = source_.Text(index);
  return source_.IsIdentifier(index) &&
         (IsVectorName(name) || name == "vec" || aliases_.contains(name));
}

/// `using NAME = ...;` and `typedef ... NAME;` that mention a vector.
void VectorNames::AddAlias(size_t index) {
  const bool is_using = source_.Is(index, "using") && source_.Is(index + 2, "=");
  if (!is_using && !source_.Is(index, "typedef")) return;
  size_t stop = index;
  bool vector = false;
  for (; stop < source_.size() && !source_.Is(stop, ";"); ++stop) {
    vector = vector || (stop > index + 1 && IsVector(stop));
  }
  const size_t name = is_using ? index + 1 : stop - 1;
  if (vector && source_.IsIdentifier(name)) aliases_.insert(source_.Text(name));
}

size_t VectorNames::TypeEnd(size_t index) const {
  if (!source_.Is(index + 1, "<")) return index + 1;
  const size_t angle = source_.ClosingAngle(index + 1, source_.size());
  return angle == kNoToken ? index + 1 : angle + 1;
}

}  // namespace metal_sim
