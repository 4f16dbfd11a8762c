// Runs the blocks of a launch on the host. The threads of a block are fibers, which give way where
// they wait for one another: in warp collectives, at barriers, at mbarriers, and before loads that
// poll.
//
// The emulation is lazy where the hardware may be: cp.async and bulk copies leave NaN in shared
// memory until the kernel has to have waited for them, and shared memory begins as NaN. What goes
// wrong is a finding, which ends the launch: a wait of all threads, an address outside of shared
// memory or misaligned, an instruction that is not emulated. Must not know a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_emulation/vector_types.h"

// The running thread's.
inline uint3 threadIdx;
inline uint3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;

namespace cuda_emulation {

struct Shape {
  dim3 grid;
  dim3 block;
  int shared_bytes = 0;
  /// Not 0: blocks start, and threads go on, in an order drawn from it. Results must not depend on
  /// it where the kernel orders its threads. 0: $MARLIN_CUDA_EMULATION_SEED, if it is set.
  uint32_t seed = 0;
};

/// Runs `thread` in every thread. Returns the findings, one a line: nothing if all went well.
std::string Run(const Shape& shape, const std::function<void()>& thread);

/// The instructions of a thread; `what` names one for findings.

[[noreturn]] void Fail(std::string finding);
int Lane();

/// Shared memory. Addresses of the shared window are 32-bit numbers.
void* DynamicShared();
void* StaticShared(const void* key, size_t bytes, size_t alignment);
template <typename T, size_t kAlignment>
T& StaticShared(const void* key) {
  return *static_cast<T*>(
      StaticShared(key, sizeof(T), kAlignment > alignof(T) ? kAlignment : alignof(T)));
}
uint32_t SharedAddress(const void* pointer);
/// The bytes at an address, which is a multiple of `alignment`.
std::byte* SharedBytes(const char* what, uint32_t address, int bytes, int alignment);

/// A warp collective of the lanes in `mask`. The last lane that arrives gets what all lanes have
/// brought, by lane, and must call Leave when it has computed; the others get null when it has.
void* const* Join(const char* what, uint32_t mask, void* mine);
void Leave();
template <typename Data, typename Compute>
void Together(const char* what, uint32_t mask, Data* mine, const Compute& compute) {
  if (void* const* const all = Join(what, mask, mine)) {
    compute([all](int lane) -> Data& { return *static_cast<Data*>(all[lane]); });
    Leave();
  }
}

/// Barriers of a block. `threads` 0: all that have not ended.
struct Votes {
  int yes = 0;
  int all = 0;
};
Votes Sync(const char* what, int barrier, int threads, bool vote);
void ArriveAtBarrier(const char* what, int barrier, int threads);

void InitBarrier(const char* what, uint32_t barrier, int arrivals);
/// Arrives after it has expected `bytes` more.
void Arrive(const char* what, uint32_t barrier, int bytes);
void Wait(const char* what, uint32_t barrier, int parity);

/// cp.async: `bytes` are read, the rest of `size` becomes zero.
void CopyAsync(const char* what, uint32_t to, const void* from, int bytes, int size);
void CommitCopies();
void WaitForCopies(int groups_left);
void WaitForAllCopies();
void ArriveWithCopies(const char* what, uint32_t barrier);
void CopyBulk(const char* what, uint32_t to, const void* from, int bytes, uint32_t barrier);

/// The bytes that bulk copies have requested into L2, in their order, until a test clears them.
inline std::vector<std::pair<const std::byte*, int>>& Prefetched() {
  static std::vector<std::pair<const std::byte*, int>> ranges;
  return ranges;
}

/// Lets all others go first: before a load that may be one of a loop that waits.
void Poll(const char* what);

}  // namespace cuda_emulation
