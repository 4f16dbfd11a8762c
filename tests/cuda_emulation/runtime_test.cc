// The emulation itself: what it computes and what it finds.
#include "cuda_emulation/runtime.h"

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/warp_matrix.cuh"

namespace marlin::cuda {
namespace {

using cuda_emulation::Emulate;
using ::testing::HasSubstr;

void SumsOfWarps(const int* from, int* to) {
  int value = from[blockIdx.x * blockDim.x + threadIdx.x];
  for (int with = 16; with > 0; with /= 2) value += __shfl_xor_sync(~0u, value, with);
  if (threadIdx.x % 32 == 0) to[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = value;
}

TEST(Emulation, RunsAllThreadsOfAllBlocks) {
  std::vector<int> from(256);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<int>(i);
  for (const uint32_t seed : {0u, 1u}) {
    std::vector<int> to(8);
    EXPECT_EQ(Emulate(SumsOfWarps, {4, 64, 0, seed}, from.data(), to.data()), "");
    for (int i = 0; i < 8; ++i) EXPECT_EQ(to[static_cast<size_t>(i)], 496 + 1024 * i);
  }
}

/// Copies 16 bytes per thread to shared memory, and reads with or without a wait.
void CopyAndRead(const float4* from, float4* to, bool waits) {
  auto* const memory = static_cast<float4*>(cuda_emulation::DynamicShared());
  CopyAsync16(SharedAddress(memory + threadIdx.x), from + threadIdx.x, 16);
  CommitCopies();
  if (waits) WaitForCopies<0>();
  __syncthreads();
  to[threadIdx.x] = memory[threadIdx.x ^ 1];
}

TEST(Emulation, DeliversCopiesWhenTheyAreWaitedFor) {
  const std::vector<float4> from(64, {1, 2, 3, 4});
  std::vector<float4> to(64);
  EXPECT_EQ(Emulate(CopyAndRead, {1, 64, 1024}, from.data(), to.data(), true), "");
  EXPECT_EQ(to[5].w, 4);
  EXPECT_EQ(Emulate(CopyAndRead, {1, 64, 1024}, from.data(), to.data(), false), "");
  EXPECT_TRUE(std::isnan(to[5].w));
  EXPECT_THAT(Emulate(CopyAndRead, {1, 64, 1008}, from.data(), to.data(), true),
              HasSubstr("thread 63: cp.async"));
}

void WaitAtBarrier(int arrivals) {
  const uint32_t barrier = SharedAddress(cuda_emulation::DynamicShared());
  if (threadIdx.x == 0) InitBarrier(barrier, arrivals);
  __syncthreads();
  ArriveWithCopies(barrier);
  Wait(barrier, 0);
}

TEST(Emulation, NamesWhatThreadsWaitFor) {
  EXPECT_EQ(Emulate(WaitAtBarrier, {1, 64, 8}, 64), "");
  EXPECT_THAT(Emulate(WaitAtBarrier, {1, 64, 8}, 65),
              HasSubstr("warp 1 lanes 0xffffffff: mbarrier."));
}

void RaiseAndWait(float* flags, int last) {
  if (threadIdx.x != 0) return;
  PublishSums(flags + 4 * blockIdx.x, {1, 1, 1, 1});
  while (PollSums(flags + 4 * last).x == 0) {
  }
}

TEST(Emulation, LetsBlocksWaitForOneAnother) {
  std::vector<float> flags(4 * 9);
  EXPECT_EQ(Emulate(RaiseAndWait, {8, 32}, flags.data(), 7), "");
  EXPECT_THAT(Emulate(RaiseAndWait, {8, 32}, flags.data(), 8), HasSubstr("polls"));
}

}  // namespace
}  // namespace marlin::cuda
