// The MMA kernels of one kind of tiles.
#pragma once

#include <iterator>
#include <utility>

#include "backends/cuda/common/instances.cuh"
#include "backends/cuda/gemm/mma/mma_kernel.cuh"

namespace marlin::cuda {

template <typename Tiles, typename T, ParameterUse kUse, int kTokens>
const void* MmaFunction() {
  if constexpr (Tiles::kSparse) {
    return reinterpret_cast<const void*>(
        &MmaKernel<Tiles::kCodes, T, kTokens, kUse, SparseStripTile>);
  } else {
    return reinterpret_cast<const void*>(&MmaKernel<Tiles::kCodes, T, kTokens, kUse>);
  }
}

template <typename Tiles>
const void* MmaKernels::Function(const Variant& variant) {
  const auto function = [&]<typename T, ParameterUse kUse>() {
    const auto of_width = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      const void* found = nullptr;
      ((kMmaWidths[kIndex] == variant.tokens
            ? static_cast<void>(found = MmaFunction<Tiles, T, kUse, kMmaWidths[kIndex]>())
            : static_cast<void>(0)),
       ...);
      return found;
    };
    return of_width(std::make_index_sequence<std::size(kMmaWidths)>());
  };
  return WithOperands<Tiles>(variant.bf16, variant.use, function);
}

}  // namespace marlin::cuda
