// The GEMV kernels of one kind of tiles.
#pragma once

#include "backends/cuda/common/instances.cuh"
#include "backends/cuda/gemm/gemv/sparse_product.cuh"

namespace marlin::cuda {

template <typename Tiles, typename T, ParameterUse kUse, int kStrips, int kOctets>
const void* GemvFunction() {
  if constexpr (Tiles::kSparse) {
    return reinterpret_cast<const void*>(
        &GemvKernel<Tiles::kCodes, T, kUse, kStrips, kOctets, SparseTileProduct>);
  } else {
    return reinterpret_cast<const void*>(&GemvKernel<Tiles::kCodes, T, kUse, kStrips, kOctets>);
  }
}

template <typename Tiles>
const void* GemvKernels::Function(const Variant& variant) {
  const auto function = [&]<typename T, ParameterUse kUse>() {
    if constexpr (kUse == ParameterUse::kOneScale && CodeBits(Tiles::kCodes) <= 4) {
      if (variant.strips == 2) return GemvFunction<Tiles, T, kUse, 2, 1>();
    }
    return variant.octets == 1 ? GemvFunction<Tiles, T, kUse, 1, 1>()
                               : GemvFunction<Tiles, T, kUse, 1, 2>();
  };
  return WithOperands<Tiles>(variant.bf16, variant.use, function);
}

}  // namespace marlin::cuda
