#include "backends/metal/gemm/row_parts.h"

#include <algorithm>

namespace marlin::metal {
namespace {

/// tile_m of the largest tile; parts are multiples of it, so that they split no tile.
constexpr int64_t kTileRows = 64;

}  // namespace

int64_t OperationsOf(const GemmDesc& desc) {
  return 2 * desc.m * desc.n * std::max<int64_t>(desc.k, 1);
}

int64_t RowsOfPart(const GemmDesc& desc) {
  // Cannot overflow: n and k are at most 2^30 each.
  const int64_t rows = kMostOperationsOfPart / (2 * desc.n * std::max<int64_t>(desc.k, 1));
  if (rows >= desc.m) return desc.m;
  return std::min(std::max(rows / kTileRows, int64_t{1}) * kTileRows, desc.m);
}

}  // namespace marlin::metal
