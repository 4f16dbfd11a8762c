// Asynchronous primitives: mbarriers and cp.async for every capability, and from 9.0 on TMA bulk
// and tensor copies, cluster barriers and DSMEM stores, programmatic dependent launch.
//
// Code of an earlier capability has neither clusters nor bulk copies: their functions trap there,
// and the host's plans (DeviceShape) never ask for them. Fences and waits that belong to them do
// nothing. CopyByWarp is for every capability.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/common/device_code.cuh"
#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

MARLIN_DEVICE uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// An mbarrier is 8 bytes of shared memory, passed by address; a phase completes when `arrivals`
/// threads have arrived and all expected bytes have been written.
MARLIN_DEVICE void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// How many of `threads`, which have met at a barrier, arrive at an mbarrier for all of them: one,
/// because arrivals cost time. The racecheck tool of compute-sanitizer does not see that the
/// others' accesses come before: builds for it let every thread arrive.
#ifdef MARLIN_CUDA_RACECHECK
constexpr int ArrivalsOf(int threads) { return threads; }
#else
constexpr int ArrivalsOf(int /*threads*/) { return 1; }
#endif
/// Makes initialized mbarriers visible to TMA and to the CTAs of the cluster.
MARLIN_DEVICE void FenceBarrierInit() {
  if constexpr (kHasTma) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
MARLIN_DEVICE void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
MARLIN_DEVICE void ArriveExpecting(uint32_t barrier, int bytes) {
  if constexpr (kHasTma) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  } else {
    __trap();
  }
}
MARLIN_DEVICE void Wait(uint32_t barrier, int parity) {
  if constexpr (kHasTma) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
}

/// True in one lane of the warp, always the same one; all lanes must call it. It tells the compiler
/// that a single thread follows: after a comparison of lane ids it issues copies in a loop.
MARLIN_DEVICE bool ElectOne() {
  uint32_t elected;
  if constexpr (kHasTma) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
  } else {
    asm("mov.u32 %0, %%laneid;" : "=r"(elected));
    return elected == 0;
  }
}

/// Copies `bytes` (0 to 16) and zero-fills up to 16; both addresses are aligned to 16.
MARLIN_DEVICE void CopyAsync16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// The same for 16 bytes.
MARLIN_DEVICE void CopyAsync16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// Copies a multiple of 16 bytes by cp.async of all lanes of a warp; at least `kLeast` bytes.
template <int kLeast = 0>
MARLIN_DEVICE void CopyByLanes(uint32_t to, const void* from, int bytes, int lane) {
  constexpr int kAtOnce = 32 * 16;
  constexpr int kWhole = kLeast / kAtOnce * kAtOnce;
  const int mine = lane * 16;
  const uint8_t* const of_lane = static_cast<const uint8_t*>(from) + mine;
#pragma unroll
  for (int i = 0; i < kWhole; i += kAtOnce) CopyAsync16(to + mine + i, of_lane + i);
#pragma unroll 1
  for (int i = kWhole; i + mine < bytes; i += kAtOnce) CopyAsync16(to + mine + i, of_lane + i);
}
template <int kLeast = 0>
MARLIN_DEVICE void CopyByLanes(uint32_t to, const void* from, int bytes) {
  int lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  CopyByLanes<kLeast>(to, from, bytes, lane);
}

/// Ends a group of this thread's cp.async copies.
MARLIN_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kLeft` cp.async groups of this thread are in flight.
template <int kLeft>
MARLIN_DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// Waits for all cp.async copies of this thread, in groups or not.
MARLIN_DEVICE void WaitForAllCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
/// Arrives at an mbarrier once this thread's cp.async copies have.
MARLIN_DEVICE void ArriveWithCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Orders writes to shared memory, by this thread or seen by it, before later bulk copies and
/// asynchronous products (wgmma).
MARLIN_DEVICE void FenceAsyncProxy() {
  if constexpr (kHasTma) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// TMA bulk copy of `bytes` (a multiple of 16, both addresses aligned to 16), counted by an
/// mbarrier.
MARLIN_DEVICE void CopyBulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  if constexpr (kHasTma) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  } else {
    __trap();
  }
}
/// Threads that arrive for a CopyByWarp, for InitBarrier.
inline constexpr int kCopyArrivals = kHasTma ? 1 : 32;
/// The same by a whole warp, which converges here: one thread's bulk copy, or cp.async of 16 bytes
/// by every thread. The mbarrier's phase completes when all of it has arrived.
MARLIN_DEVICE void CopyByWarp(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  if constexpr (kHasTma) {
    if (ElectOne()) {
      ArriveExpecting(barrier, bytes);
      CopyBulk(to, from, bytes, barrier);
    }
  } else {
    CopyByLanes(to, from, bytes);
    ArriveWithCopies(barrier);
  }
}
/// The same by a CTA of kThreads, of several runs of bytes: bulk copies of the one thread that
/// calls the functions below, or cp.async by all threads, which call them together.
template <int kThreads>
struct BlockCopies {
  /// Threads that arrive for a copy, for InitBarrier.
  static constexpr int kArrivals = kHasTma ? 1 : kThreads;
  static MARLIN_DEVICE bool Calls() { return !kHasTma || threadIdx.x == 0; }

  uint32_t barrier;

  /// Begins a copy of `bytes` in all.
  MARLIN_DEVICE BlockCopies(uint32_t barrier, int bytes) : barrier(barrier) {
    if constexpr (kHasTma) ArriveExpecting(barrier, bytes);
  }
  MARLIN_DEVICE void Copy(uint32_t to, const void* from, int bytes) const {
    if constexpr (kHasTma) {
      CopyBulk(to, from, bytes, barrier);
    } else {
      for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += kThreads * 16) {
        CopyAsync16(to + i, static_cast<const uint8_t*>(from) + i, 16);
      }
    }
  }
  /// After the last run.
  MARLIN_DEVICE void End() const {
    if constexpr (!kHasTma) ArriveWithCopies(barrier);
  }
};
/// CopyBulk, multicast to the CTAs of the cluster whose bits are set, at the same address in each.
MARLIN_DEVICE void CopyBulkToCluster(uint32_t to, const void* from, int bytes, uint32_t barrier,
                                     uint32_t blocks) {
  if constexpr (kHasMulticast) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
        : "memory");
  } else {
    __trap();
  }
}
/// Requests bytes as CopyBulk does, into L2 only.
MARLIN_DEVICE void PrefetchBulk(const void* from, int bytes) {
  if constexpr (kHasTma) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  }
}
/// Copies the TMA tile of a tensor map that begins at (x, y); elements outside of the tensor read
/// as zero.
MARLIN_DEVICE void CopyBox(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
  if constexpr (kHasTma) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
  } else {
    __trap();
  }
}

/// Programmatic dependent launch (PDL). TriggerDependentLaunch lets the next kernel on the stream
/// begin; WaitForEarlierWork returns when earlier kernels have ended, and must come before reads of
/// what they write and writes to what they read.
MARLIN_DEVICE void TriggerDependentLaunch() {
  if constexpr (kHasTma) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
MARLIN_DEVICE void WaitForEarlierWork() {
  if constexpr (kHasTma) asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// The two halves of a barrier across all threads of a cluster: after it every CTA is running and
/// has initialized its mbarriers (FenceBarrierInit). It publishes nothing else: a release would
/// wait until all stores of the CTA have reached memory.
MARLIN_DEVICE void ArriveInCluster() {
  if constexpr (kHasTma) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  } else {
    __trap();
  }
}
MARLIN_DEVICE void WaitForCluster() {
  if constexpr (kHasTma) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    __trap();
  }
}

/// A barrier across all threads of a cluster that publishes what they wrote to shared and global
/// memory.
MARLIN_DEVICE void SyncCluster() {
  if constexpr (kHasTma) {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
  } else {
    __trap();
  }
}
/// The generic address, in CTA `rank` of the cluster, of an object in this CTA's shared memory.
template <typename T>
MARLIN_DEVICE T* ObjectInBlock(T* object, int rank) {
  T* remote = object;
  if constexpr (kHasTma) {
    asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(object), "r"(rank));
  }
  return remote;
}

/// The DSMEM address, in CTA `rank` of the cluster, of an address in this CTA's shared memory.
MARLIN_DEVICE uint32_t AddressInBlock(uint32_t address, int rank) {
  uint32_t remote = address;
  if constexpr (kHasTma) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  }
  return remote;
}

/// Stores 16 bytes to DSMEM, counted by an mbarrier of the destination CTA.
MARLIN_DEVICE void StoreToCluster(uint32_t to, const float4& value, uint32_t barrier) {
  if constexpr (kHasTma) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
  } else {
    __trap();
  }
}

/// Adds 1 to a counter in global memory and returns its previous value. Orders nothing else.
MARLIN_DEVICE uint32_t IncrementTileCounter(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

/// Flag-in-data exchange of four floats between CTAs: each word becomes visible on its own.
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

MARLIN_DEVICE void StoreShared8(uint32_t address, const uint2& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
MARLIN_DEVICE void StoreShared16(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
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
