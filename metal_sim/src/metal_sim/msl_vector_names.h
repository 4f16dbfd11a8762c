// Which names of a source are types of vectors. Knows nothing of their use.
#pragma once

#include <set>
#include <string_view>

#include "metal_sim/msl_source.h"

namespace metal_sim {

/// Knows a type by its name: a vector's (half4, packed_float3), vec<T, N>, or one that the
/// source declares (`using`, `typedef`) for a vector.
class VectorNames {
 public:
  /// `source` must outlive this.
  explicit VectorNames(const MslSource& source);

  bool IsVector(size_t index) const;
  /// Past the type whose name is at `index`.
  size_t TypeEnd(size_t index) const;

 private:
  void AddAlias(size_t index);

  const MslSource& source_;
  std::set<std::string_view> aliases_;
};

}  // namespace metal_sim
