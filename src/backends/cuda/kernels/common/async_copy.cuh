// Hopper's asynchronous machinery: barriers in shared memory, bulk and tensor copies, and launches
// that overlap the kernel before.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/kernels/common/fragment_math.cuh"

namespace marlin::cuda {

MARLIN_DEVICE uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Barriers are 8 bytes of shared memory, given by address; a phase ends when `arrivals` threads
/// have arrived and all expected bytes are there.
MARLIN_DEVICE void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine.
MARLIN_DEVICE void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
MARLIN_DEVICE void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
MARLIN_DEVICE void ArriveExpecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
MARLIN_DEVICE void Wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// One lane of the warp, always the same, for what one thread does; all lanes must come here. From
/// this the compiler knows that it is one: behind a comparison of lanes it issues copies in a loop.
MARLIN_DEVICE bool ElectOne() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

/// Copies `bytes` (0 to 16) and zeros the rest of 16; both sides aligned to 16.
MARLIN_DEVICE void CopyAsync16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// Copies `bytes` (a multiple of 16, both sides aligned to 16) and counts them at the barrier.
MARLIN_DEVICE void CopyBulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// The same to all blocks of the cluster whose bits are set, at the same addresses in each.
MARLIN_DEVICE void CopyBulkToCluster(uint32_t to, const void* from, int bytes, uint32_t barrier,
                                     uint32_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}
/// Copies the box of a tensor map that begins at (x, y); what lies outside reads as zero.
MARLIN_DEVICE void CopyBox(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

/// Programmatic dependent launch: the next kernel on the stream may begin; and, before anything
/// that earlier kernels wrote is read or anything that they read is written, they have ended.
MARLIN_DEVICE void TriggerDependentLaunch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
MARLIN_DEVICE void WaitForEarlierWork() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// The two halves of a barrier among all threads of a cluster, which tells that all have come so
/// far and have made their barriers ready (FenceBarrierInit). It publishes nothing else: a release
/// would wait until all stores of the block have reached memory.
MARLIN_DEVICE void ArriveInCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
MARLIN_DEVICE void WaitForCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// What an address in this block's shared memory is in block `rank` of the cluster.
MARLIN_DEVICE uint32_t AddressInBlock(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

/// Stores 16 bytes at an address in a block of the cluster and counts them at a barrier there.
MARLIN_DEVICE void StoreToCluster(uint32_t to, const float4& value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

/// Adds 1 to a counter in memory and returns what it was. Orders nothing else.
MARLIN_DEVICE uint32_t IncrementTileCounter(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

/// Four floats that blocks hand each other in memory: every word by itself is seen or not yet.
MARLIN_DEVICE void PublishSums(float* to, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
MARLIN_DEVICE uint4 PollSums(const float* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

/// The attribute of a launch that may begin before the one before it has ended.
inline cudaLaunchAttribute ChainedLaunch() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

MARLIN_DEVICE uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
MARLIN_DEVICE uint2 LoadShared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
MARLIN_DEVICE uint32_t LoadShared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

}  // namespace marlin::cuda
