// One launch while it runs: places threadgroups, gives threads their turns, and answers what
// kernels ask of the Runtime table. Must not know the rules of memory (access_checker.h) or of
// barriers (rendezvous.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "metal_sim/access_checker.h"
#include "metal_sim/crash_guard.h"
#include "metal_sim/device_memory.h"
#include "metal_sim/finding_log.h"
#include "metal_sim/launch.h"
#include "metal_sim/launch_checks.h"
#include "metal_sim/random_source.h"
#include "metal_sim/rendezvous.h"
#include "metal_sim/threads.h"

namespace metal_sim {

class Simulation {
 public:
  /// The parameters must outlive the simulation.
  Simulation(const Kernel& kernel, const Launch& launch, const SimulationOptions& options);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Validates and allocates. Errors: as Simulate.
  Status Prepare();
  /// Runs all threads, or until something ends the launch. Precondition: Prepare succeeded.
  void Run();
  /// Copies the results to the caller's buffers and returns the report.
  Report Finish();

  /// The simulation whose fiber runs on this thread of the operating system, or null.
  static Simulation* Current() { return current_; }

  // The functions of Runtime, on behalf of the current thread.
  void* Buffer(int index) const;
  void* ThreadgroupArgument(int index) const;
  void* ThreadgroupVariable(int id, size_t bytes, size_t alignment, const char* name);
  Triple Position(Source source) const;
  uint32_t Lane() const;
  /// The wait record of the current thread, for the caller to fill field by field, which is faster
  /// than copying a fresh one; null where a wait makes no sense: outside of a thread, and in a
  /// collective, which stands for all its lanes.
  Waiting* BeginToWait() {
    return thread_ == nullptr || fiber_ == &collective_fiber_ ? nullptr : &thread_->waiting;
  }
  /// Returns when the current thread may go on. Precondition: BeginToWait gave something.
  void Wait(ThreadState state) {
    thread_->state = state;
    fiber_->GiveWay();
  }
  void WaitAtBarrier(ThreadState state, uint32_t flags, const void* site) {
    Waiting* waiting = BeginToWait();
    if (waiting == nullptr) return;
    waiting->site = site;
    waiting->flags = flags;
    Wait(state);
  }
  /// The hot call of a kernel: several per multiply-add.
  void Access(const MemoryAccess& access) {
    if (thread_ == nullptr || access.bytes == 0) return;
    if (access.address - thread_->stack_bottom < memory_->stacks.usable_bytes()) return;
    if (fiber_ != &collective_fiber_) {
      if (--countdown_ == 0) Interrupt();
      if (!checker_->Check(*thread_, access)) EndLaunch();
    } else if (!checker_->CheckShared(*thread_, access)) {
      EndLaunch();
    }
  }
  void Atomic(const MemoryAccess& access, int order);
  void Fence(uint32_t flags, int order, int scope, const void* site);
  void CountMatrixOperation(uint64_t multiply_adds);
  void Fault(const char* what, const void* site);
  void ReportUndefined(const char* what);
  /// Whether a signal of the operating system is an error of the kernel: it came on a fiber.
  bool IsOnFiber() const { return fiber_ != nullptr; }
  /// The top of a stack that nothing needs once the launch has ended.
  std::byte* SpareStack() const { return collective_stack_ + memory_->stacks.usable_bytes(); }
  /// On the spare stack: reports the signal and ends the launch.
  [[noreturn]] void Crash(const CrashSite& crash);

 private:
  Status PlaceMemory(const std::vector<BufferContent>& contents);
  void MakePlaces(size_t count);

  // Scheduling.
  bool FillPlaces();
  void Begin(Threadgroup* group, uint32_t index);
  void BeginThread(Threadgroup* group, uint32_t index);
  void AddThreadgroupArguments(const Threadgroup& group);
  uint32_t NextThreadgroup();
  void CollectTurns();
  bool InterruptsAtRandom() const { return options_.seed != 0 && options_.preemption > 0; }
  void DrawInterruption();
  void TakeTurn(Thread* thread);
  void RunCollective(Thread& first, void* const* data, uint32_t lanes);

  // On a fiber.
  static void RunKernel();
  static void RunCollectiveFunction();
  void Interrupt();
  /// Counts a turn in which nothing may have happened, and gives way.
  void GiveWayIdly(int64_t steps, const void* site);
  /// Ends the launch and leaves the fiber for good.
  [[noreturn]] void EndLaunch();

  const Kernel& kernel_;
  const Launch& launch_;
  const SimulationOptions& options_;
  Grid grid_;

  FindingLog log_;
  Counters counters_;
  AccessOrder order_;
  std::unique_ptr<CheckedMemory> memory_;
  std::optional<AccessChecker> checker_;
  std::optional<Rendezvous> rendezvous_;
  RandomSource random_;

  std::vector<Threadgroup> places_;
  std::vector<uint32_t> threadgroup_order_;  ///< Empty: in order.
  uint32_t next_threadgroup_ = 0;
  std::vector<Thread*> turns_;  ///< The threads that run in this round.
  bool over_ = false;

  Thread* thread_ = nullptr;  ///< The current one; null between turns.
  Fiber* fiber_ = nullptr;    ///< The one that runs: the thread's, collective_fiber_ or null.
  /// Collectives run on a fiber of their own, so that they too can be left for good.
  Fiber collective_fiber_;
  std::byte* collective_stack_ = nullptr;
  struct {
    void* const* data;
    uint32_t lanes;
  } collective_{};

  /// Accesses until the thread that comes to it is interrupted. At random, the count
  /// carries over from turn to turn, so that rare interruptions do occur.
  uint32_t countdown_ = 0;
  uint32_t countdown_start_ = 0;
  int64_t idle_accesses_ = 0;
  int64_t idle_steps_ = 0;

  inline static constinit thread_local Simulation* current_ = nullptr;
  /// Memory of the last simulation on this thread, reused: mapping takes longer than most launches.
  inline static constinit thread_local std::unique_ptr<CheckedMemory> spare_memory_;
};

}  // namespace metal_sim
