// The base of the persistent kernel's parts with rows.
#pragma once

#include "backends/cuda/common/thread_barrier.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

MARLIN_DEVICE void AddTo(float4& sum, const float4& v) {
  sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
}
MARLIN_DEVICE float4 ScaledAdd(const float4& v, float factor, const float4& addend) {
  return {__fmaf_rn(v.x, factor, addend.x), __fmaf_rn(v.y, factor, addend.y),
          __fmaf_rn(v.z, factor, addend.z), __fmaf_rn(v.w, factor, addend.w)};
}
/// The sum over a warp, in all lanes.
MARLIN_DEVICE float WarpSum(float value) {
  __syncwarp();
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

/// A part of the kernel, in a thread.
class RowsPart {
 protected:
  MARLIN_DEVICE explicit RowsPart(const PersistentArguments& args)
      : args_(args),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        lane_(static_cast<int>(threadIdx.x) & 31),
        tables_{args} {}

  MARLIN_DEVICE const PersistentLayer& LayerOf(int phase) const {
    return tables_.LayerOf(phase / kPhases);
  }
  MARLIN_DEVICE PersistentScratch& Scratch() const { return tables_.Scratch(); }
  MARLIN_DEVICE RowsScratch& Rows() const { return FixedRows(); }
  MARLIN_DEVICE uint32_t* Words(int layer) const {
    return args_.words + ((Scratch().clock + layer) & 1) * args_.exchange.words;
  }
  MARLIN_DEVICE uint32_t Tag(int layer) const { return TagOf(Scratch().clock + layer); }

  const PersistentArguments& args_;
  int thread_;
  int warp_;
  int lane_;
  Tables tables_;
};

}  // namespace marlin::cuda
