#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/measure/roofline.h"

namespace marlin::cuda {
namespace {

constexpr int kBulkBytes = 16 << 10;
/// 192 KiB in flight per SM: several times bandwidth x latency.
constexpr int kMostStages = 12;
/// On devices with less shared memory, which have less bandwidth per SM.
constexpr int kFewStages = 5;
constexpr int kLoadThreads = 512;
constexpr int kLoadBlocksPerSm = 2;
constexpr int kUnroll = 8;  // kLoadThreads x kUnroll x 16 bytes: 64 KiB per iteration and CTA.

/// One thread, or a warp where there are no bulk copies, keeps kStages copies in flight. No thread
/// reads the data: once a copy completes, its stage is free.
template <int kStages>
__global__ void __launch_bounds__(32) ReadBulk(const uint8_t* data, int64_t chunk_count) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t barriers[kStages];
  using Copies = BlockCopies<32>;
  if (!Copies::Calls()) return;
  for (int stage = 0; stage < kStages; ++stage) {
    if (threadIdx.x == 0) InitBarrier(SharedAddress(&barriers[stage]), Copies::kArrivals);
  }
  FenceBarrierInit();
  if constexpr (Copies::kArrivals > 1) __syncwarp();
  const int64_t stride = gridDim.x;
  const int64_t count = (chunk_count - blockIdx.x + stride - 1) / stride;
  for (int64_t i = 0; i < count + kStages; ++i) {
    const int stage = static_cast<int>(i % kStages);
    const uint32_t barrier = SharedAddress(&barriers[stage]);
    const int64_t round = i / kStages;
    if (round > 0 && i - kStages < count) Wait(barrier, static_cast<int>((round - 1) & 1));
    if (i < count) {
      const Copies copies(barrier, kBulkBytes);
      copies.Copy(SharedAddress(ring + stage * kBulkBytes),
                  data + (blockIdx.x + i * stride) * kBulkBytes, kBulkBytes);
      copies.End();
    }
  }
}

template <int kStages>
cudaError_t Start(const void* data, int64_t bytes, int sm_count, cudaStream_t stream) {
  constexpr int kRingBytes = kStages * kBulkBytes;
  const cudaError_t error = cudaFuncSetAttribute(
      ReadBulk<kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
  if (error != cudaSuccess) return error;
  ReadBulk<kStages>
      <<<sm_count, 32, kRingBytes, stream>>>(static_cast<const uint8_t*>(data), bytes / kBulkBytes);
  return cudaGetLastError();
}

__device__ __forceinline__ uint4 LoadOnce(const uint4* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

__global__ void __launch_bounds__(kLoadThreads, kLoadBlocksPerSm)
    ReadLoads(const uint4* data, int64_t step_count, uint32_t* sink) {
  uint32_t all = 0;
  for (int64_t step = blockIdx.x; step < step_count; step += gridDim.x) {
    const uint4* const source = data + step * (kLoadThreads * kUnroll) + threadIdx.x;
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) values[i] = LoadOnce(source + i * kLoadThreads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      all |= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
    }
  }
  // `sink` is null, which the compiler cannot know, so it keeps the loads.
  if (sink != nullptr) atomicOr(sink, all);
}

__global__ void Empty() {}

}  // namespace

cudaError_t LaunchReadBulk(const void* data, int64_t bytes, int sm_count, cudaStream_t stream) {
  int most = 0;
  if (const cudaError_t error = MostShared(&most); error != cudaSuccess) return error;
  constexpr int kStaticBytes = 1 << 10;
  return most >= kMostStages * kBulkBytes + kStaticBytes
             ? Start<kMostStages>(data, bytes, sm_count, stream)
             : Start<kFewStages>(data, bytes, sm_count, stream);
}

cudaError_t LaunchReadLoads(const void* data, int64_t bytes, int sm_count, cudaStream_t stream) {
  ReadLoads<<<sm_count * kLoadBlocksPerSm, kLoadThreads, 0, stream>>>(
      static_cast<const uint4*>(data), bytes / (kLoadThreads * kUnroll * 16), nullptr);
  return cudaGetLastError();
}

cudaError_t LaunchEmpty(cudaStream_t stream) {
  Empty<<<1, 32, 0, stream>>>();
  return cudaGetLastError();
}

}  // namespace marlin::cuda
