#include "backends/metal/row_parts.h"

#include <algorithm>
#include <cstddef>

namespace marlin::metal {
namespace {

/// tile_m of the largest tile; parts are multiples of it, so that they split no tile.
constexpr int64_t kTileRows = 64;

}  // namespace

int64_t RowsOfPart(const GemmDesc& desc) {
  // Cannot overflow: n and k are at most 2^30 each.
  const int64_t rows = kMostOperationsOfPart / (2 * desc.n * std::max<int64_t>(desc.k, 1));
  if (rows >= desc.m) return desc.m;
  return std::min(std::max(rows / kTileRows, int64_t{1}) * kTileRows, desc.m);
}

GemmCall PartOf(const GemmCall& call, int64_t first, int64_t rows) {
  GemmCall part = call;
  part.desc.m = rows;
  part.a =
      static_cast<const std::byte*>(call.a) + first * call.a_stride * DTypeBytes(call.desc.a_type);
  part.c = static_cast<std::byte*>(call.c) + first * call.c_stride * DTypeBytes(call.desc.c_type);
  if (call.epilogue.row_weight != nullptr) part.epilogue.row_weight += first;
  return part;
}

}  // namespace marlin::metal
