// The order of Hopper's asynchronous products (wgmma), their operands in shared memory, and the
// warpgroups that run them.
#pragma once

#include <cstdint>

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

MARLIN_DEVICE void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MARLIN_DEVICE void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
MARLIN_DEVICE void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler, for which an asynchronous WGMMA is complete at once, from moving
/// accumulators in flight.
template <int kCount>
MARLIN_DEVICE void PinSums(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

/// The matrix descriptor of rows of 64 16-bit numbers in the 128-byte swizzle. `low` is address /
/// 16; its upper half matters where the rows are k and continue in another panel: the bytes from
/// panel to panel / 16.
MARLIN_DEVICE uint64_t Descriptor(uint32_t low) {
  // Atoms of 8 rows are 1024 bytes apart; bit 62 is the 128-byte swizzle.
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(64u | (1u << 30)));
  return descriptor;
}

/// The warp's index, in a form that the compiler knows to be uniform across lanes.
MARLIN_DEVICE int WarpOfBlock() {
  return static_cast<int>(__reduce_or_sync(~0u, threadIdx.x / 32));
}

/// A barrier across the warps of a consumer warpgroup.
MARLIN_DEVICE void SyncWarpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

}  // namespace marlin::cuda
