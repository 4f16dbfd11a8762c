// Barriers of the first threads of a CTA, whose other warps do not take part.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

/// The hardware's barrier of SyncFirst; barrier 0 belongs to __syncthreads().
inline constexpr int kFirstBarrier = 15;

/// __syncthreads() of threads 0 to kThreads - 1: whole warps, all of which call it.
template <int kThreads>
MARLIN_DEVICE void SyncFirst() {
  asm volatile("bar.sync %0, %1;" ::"n"(kFirstBarrier), "n"(kThreads) : "memory");
}
/// The same; returns whether `mine` is true in any of them.
template <int kThreads>
MARLIN_DEVICE bool SyncFirstAny(bool mine) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine;\n"
      ".reg .pred any;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "bar.red.or.pred any, %3, %2, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(mine ? 1 : 0), "n"(kThreads), "n"(kFirstBarrier)
      : "memory");
  return any != 0;
}

}  // namespace marlin::cuda
