// The WGMMA kernels of one kind of tiles.
#pragma once

#include <iterator>
#include <utility>

#include "backends/cuda/common/instances.cuh"
#include "backends/cuda/gemm/wgmma/sparse_warp_tile.cuh"

namespace marlin::cuda {

template <typename Tiles, typename T, ParameterUse kUse, int kTokens>
const void* WgmmaFunction() {
  if constexpr (Tiles::kSparse) {
    return reinterpret_cast<const void*>(
        &WgmmaKernel<Tiles::kCodes, T, kTokens, kUse, SparseWarpTile>);
  } else {
    return reinterpret_cast<const void*>(&WgmmaKernel<Tiles::kCodes, T, kTokens, kUse>);
  }
}

template <typename Tiles>
const void* WgmmaKernels::Function(const Variant& variant) {
  const auto function = [&]<typename T, ParameterUse kUse>() {
    const auto of_width = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      const void* found = nullptr;
      ((kWgmmaWidths[kIndex] == variant.tokens
            ? static_cast<void>(found = WgmmaFunction<Tiles, T, kUse, kWgmmaWidths[kIndex]>())
            : static_cast<void>(0)),
       ...);
      return found;
    };
    return of_width(std::make_index_sequence<std::size(kWgmmaWidths)>());
  };
  return WithOperands<Tiles>(variant.bf16, variant.use, function);
}

}  // namespace marlin::cuda
