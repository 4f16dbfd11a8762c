// The GEMV kernels of one kind of tiles.
#pragma once

#include "backends/cuda/common/instances.cuh"
#include "backends/cuda/gemm/gemv/sparse_product.cuh"

namespace marlin::cuda {

template <CodeKind kKind, bool kSparse, typename T, ParameterUse kUse, int kStrips, int kOctets>
const void* GemvFunction() {
  if constexpr (kSparse) {
    return reinterpret_cast<const void*>(
        &GemvKernel<kKind, T, kUse, kStrips, kOctets, SparseTileProduct>);
  } else {
    return reinterpret_cast<const void*>(&GemvKernel<kKind, T, kUse, kStrips, kOctets>);
  }
}

template <CodeKind kKind, bool kSparse>
const void* GemvKernels::Function(const Variant& variant) {
  const auto function = [&]<typename T, ParameterUse kUse>() {
    if constexpr (kUse == ParameterUse::kOneScale && CodeBits(kKind) <= 4) {
      if (variant.strips == 2) return GemvFunction<kKind, kSparse, T, kUse, 2, 1>();
    }
    return variant.octets == 1 ? GemvFunction<kKind, kSparse, T, kUse, 1, 1>()
                               : GemvFunction<kKind, kSparse, T, kUse, 1, 2>();
  };
  return WithOperands<kKind, kSparse>(variant.bf16, variant.use, function);
}

}  // namespace marlin::cuda
