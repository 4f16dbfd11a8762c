// One block of a launch: its threads, what they wait for, and its shared memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda_emulation/runtime.h"
#include "metal_sim/fiber.h"

namespace cuda_emulation {

/// An asynchronous copy to shared memory that has not arrived.
struct PendingCopy {
  std::byte* to;
  const std::byte* from;
  int bytes;
  int size;
  int64_t number;  ///< Among the thread's copies.

  void Perform() const;
};

struct Thread {
  metal_sim::Fiber fiber;
  uint3 index = {};
  int number = 0;
  bool ended = false;
  /// The last wait: an instruction, and which barrier or lanes.
  const char* instruction = "nothing";
  const char* of = "";
  uint32_t operand = 0;
  Votes votes;  ///< At the barrier that it left last.

  std::vector<PendingCopy> copies;
  int64_t copies_issued = 0;
  std::vector<int64_t> groups;  ///< Copies issued before the end of each group.
};

class Block {
 public:
  using Random = std::minstd_rand;

  /// `random` null: of the warps that can go on, the first does. Else they take turns of random
  /// lengths, so that some get far ahead of others.
  Block(const Shape& shape, uint3 index, metal_sim::FiberStacks* stacks, Random* random);

  enum class Outcome : uint8_t { kEnded, kPaused, kFailed };
  /// Runs until all threads have ended, or it is another block's turn: threads that can run have
  /// polled, or, where the order is random, at any time.
  Outcome Run();

  const std::string& finding() const { return finding_; }
  uint3 index() const { return index_; }
  /// Threads that began to run, except for those that had polled.
  int64_t progress() const { return progress_; }
  /// The waits of all threads.
  std::string DescribeWaits() const;

  // Called by the running thread; as the functions of runtime.h.
  Thread& current() { return *current_; }
  [[noreturn]] void Fail(std::string finding);
  void* dynamic_shared() { return shared_; }
  void* StaticShared(const void* key, size_t bytes, size_t alignment);
  uint32_t SharedAddress(const void* pointer);
  std::byte* SharedBytes(const char* what, uint32_t address, int bytes, int alignment);
  void* const* Join(const char* what, uint32_t mask, void* mine);
  void Leave();
  Votes Sync(const char* what, int barrier, int threads, bool vote, bool waits);
  void InitBarrier(const char* what, uint32_t barrier, int arrivals);
  void Arrive(const char* what, uint32_t barrier, int bytes);
  void Wait(const char* what, uint32_t barrier, int parity);
  void ArriveWithCopies(const char* what, uint32_t barrier);
  void CopyBulk(const char* what, uint32_t to, const void* from, int bytes, uint32_t barrier);
  void Poll(const char* what);
  static void PerformCopies(Thread* thread, int64_t before);

 private:
  struct Collective {
    const char* what = nullptr;
    uint32_t mask = 0;
    uint32_t arrived = 0;
    std::array<void*, 32> data = {};
  };
  struct NamedBarrier {
    int expected = 0;
    int arrived = 0;
    Votes votes;
    std::vector<Thread*> waiting;
  };
  /// Copies of a thread, or a bulk copy, that arrive at an mbarrier.
  struct Arrival {
    Thread* thread = nullptr;
    int64_t copies = 0;
    PendingCopy bulk = {};
  };
  struct MemoryBarrier {
    int arrivals = 0;
    int pending = 0;
    int64_t bytes = 0;
    int phase = 0;
    std::vector<Thread*> waiting;
    std::vector<Arrival> on_the_way;
  };

  void MakeReady(Thread* thread);
  void Release(Thread* thread);
  void GiveWay(const char* instruction, const char* of, uint32_t operand);
  bool Deliver();
  void Deliver(MemoryBarrier* barrier);
  void CompletePhase(MemoryBarrier* barrier);
  void CompleteBarrier(NamedBarrier* barrier);
  MemoryBarrier& BarrierAt(const char* what, uint32_t address);
  Thread* TakeReady();

  const Shape& shape_;
  uint3 index_;
  Random* random_;
  std::unique_ptr<Thread[]> threads_;
  int thread_count_;
  int ended_ = 0;
  int64_t progress_ = 0;
  Thread* current_ = nullptr;
  std::vector<std::deque<Thread*>> ready_;  ///< By warp.
  std::vector<size_t> order_;               ///< The warps, the first that takes its turn first.
  int ready_count_ = 0;
  std::vector<Thread*> polling_;
  std::string finding_;

  std::vector<std::byte> memory_;
  std::byte* shared_ = nullptr;  ///< Dynamic shared memory, then static.
  size_t static_begin_ = 0;
  size_t static_end_ = 0;
  std::map<const void*, size_t> static_places_;

  std::vector<std::vector<Collective>> collectives_;  ///< By warp.
  std::array<NamedBarrier, 16> barriers_;
  std::map<uint32_t, MemoryBarrier> memory_barriers_;
};

/// Sets the function that threads of new blocks run.
void SetKernel(const std::function<void()>* thread);

/// The block whose thread runs.
Block& RunningBlock();

}  // namespace cuda_emulation
