// Counting the items of a launch of experts, on the device, from the sorted slots.
#pragma once

#include "backends/cuda/common/block_scan.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"

namespace marlin::cuda {

/// first[i] = the items of the entries before i, for i from 0 to `count`; entry i has
/// `items_of(i)`. A word for every warp follows `first`. Called by all threads; __syncthreads() has
/// to follow.
template <int kThreads, typename ItemsOf>
MARLIN_DEVICE void CountItems(int count, const ItemsOf& items_of, int* first) {
  const int thread = static_cast<int>(threadIdx.x);
  const int per_thread = (count + kThreads - 1) / kThreads;
  const int begin = min(thread * per_thread, count);
  const int end = min(begin + per_thread, count);
  int mine = 0;
  for (int i = begin; i < end; ++i) mine += items_of(i);
  int item = SumBefore(mine, first + count + 1);
  for (int i = begin; i < end; ++i) {
    first[i] = item;
    item += items_of(i);
  }
  if (thread == kThreads - 1) first[count] = item;
}

}  // namespace marlin::cuda
