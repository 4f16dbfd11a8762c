// Sums over the lanes of a warp, as trees: the bits do not depend on how the numbers are dealt to
// the lanes, if the tree is the same.
#pragma once

#include <bit>

#include "backends/cuda/common/device_code.cuh"

namespace marlin::cuda {

/// The sum of the values of lanes l and l ^ `lane`, in both.
MARLIN_DEVICE double SumWith(double value, int lane) {
  return value + __shfl_xor_sync(~0u, value, lane);
}

/// The sum of both firsts in one of lanes l and l ^ `lane`, and the sum of both seconds in the
/// other, whose number has the bit.
MARLIN_DEVICE double SumOfOne(double first, double second, int lane) {
  const bool has_second = (threadIdx.x & static_cast<unsigned>(lane)) != 0;
  const double sent = has_second ? first : second;
  return (has_second ? second : first) + __shfl_xor_sync(~0u, sent, lane);
}

/// The sums of numbers i 2^kLevel and following, over the lanes that differ in kLevel high bits of
/// their numbers. These bits say which of the 2^kLevel sums a lane receives, the low bit first.
template <int kLevel, typename Number>
MARLIN_DEVICE double SumOfHighLanes(const Number& number, int i) {
  if constexpr (kLevel == 0) {
    return number(i);
  } else {
    return SumOfOne(SumOfHighLanes<kLevel - 1>(number, 2 * i),
                    SumOfHighLanes<kLevel - 1>(number, 2 * i + 1), 32 >> kLevel);
  }
}

/// The sum of number(0) to number(kCount - 1) of every lane, in all lanes: of each number over the
/// lanes, the high bit of a lane's number first, then of these sums in the same way.
template <int kCount, typename Number>
MARLIN_DEVICE double SumOfAll(const Number& number) {
  constexpr int kLevel = std::countr_zero(static_cast<unsigned>(kCount));
  static_assert(1 << kLevel == kCount);
  double sum = SumOfHighLanes<kLevel>(number, 0);
#pragma unroll
  for (int lane = 16 >> kLevel; lane > 0; lane /= 2) sum = SumWith(sum, lane);
#pragma unroll
  for (int lane = 32 >> kLevel; lane < 32; lane *= 2) sum = SumWith(sum, lane);
  return sum;
}

}  // namespace marlin::cuda
