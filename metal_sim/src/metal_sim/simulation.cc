#include "metal_sim/simulation.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace metal_sim {
namespace {

/// A thread that does not wait is interrupted after this many accesses, so that others get on even
/// if it waits for them in a loop.
constexpr uint32_t kAccessesPerTurn = 1024;

/// By how much the stacks of neighbouring threads are shifted: an odd number of cache lines.
constexpr size_t kStackStagger = size_t{9} * 64;
constexpr size_t kStackStaggers = size_t{64} * 64;

/// Memory is left to the next launch if it is no more than this and has seen so few epochs, of
/// which there are 2^32.
constexpr size_t kMostSpareBytes = size_t{256} << 20;
constexpr uint32_t kMostEpochs = uint32_t{1} << 30;

/// The id of [[threadgroup(index)]] among the variables of an arena; module variables are not
/// negative.
int ArgumentId(int index) { return -1 - index; }

}  // namespace

Simulation::Simulation(const Kernel& kernel, const Launch& launch, const SimulationOptions& options)
    : kernel_(kernel),
      launch_(launch),
      options_(options),
      memory_(std::move(spare_memory_)),
      random_(options.seed, options.preemption) {
  if (memory_ == nullptr) memory_ = std::make_unique<CheckedMemory>();
  order_.epochs = EpochTable(memory_->epochs);
}

Simulation::~Simulation() {
  memory_->epochs = order_.epochs.last();
  const bool lasts =
      std::max(memory_->epochs.of_device, memory_->epochs.of_threadgroup) < kMostEpochs;
  if (lasts && memory_->device.held_bytes() <= kMostSpareBytes) spare_memory_ = std::move(memory_);
}

Status Simulation::Prepare() {
  METAL_SIM_RETURN_IF_ERROR(CheckOptions(options_));
  METAL_SIM_ASSIGN_OR_RETURN(grid_, PlanGrid(kernel_, launch_));
  METAL_SIM_RETURN_IF_ERROR(CheckThreadgroupMemory(kernel_, launch_));
  METAL_SIM_ASSIGN_OR_RETURN(const std::vector<BufferContent> contents,
                             CollectBuffers(kernel_, launch_));
  METAL_SIM_RETURN_IF_ERROR(PlaceMemory(contents));
  checker_.emplace(memory_.get(), &order_, &log_, &counters_, grid_.threadgroups, options_.check,
                   launch_);
  rendezvous_.emplace(&order_, &log_, &counters_, &*checker_,
                      [this](Thread& first, void* const* data, uint32_t lanes) {
                        RunCollective(first, data, lanes);
                      });
  if (options_.seed != 0) {
    threadgroup_order_.resize(grid_.threadgroup_count);
    for (uint32_t i = 0; i < grid_.threadgroup_count; ++i) {
      const uint32_t other = random_.Below(i + 1);
      threadgroup_order_[i] = threadgroup_order_[other];
      threadgroup_order_[other] = i;
    }
  }
  return {};
}

Status Simulation::PlaceMemory(const std::vector<BufferContent>& contents) {
  const auto resident = static_cast<uint32_t>(options_.resident_threadgroups);
  const size_t place_count = std::min(resident, grid_.threadgroup_count);
  const size_t thread_count = place_count * grid_.threads_per_threadgroup_count;
  METAL_SIM_RETURN_IF_ERROR(memory_->device.Place(contents, options_.check));
  METAL_SIM_RETURN_IF_ERROR(memory_->addressed.Place(launch_.addressed_ranges, options_.check));
  METAL_SIM_RETURN_IF_ERROR(memory_->threadgroups.Place(place_count));
  METAL_SIM_RETURN_IF_ERROR(memory_->stacks.Place(thread_count + 1));
  collective_stack_ = memory_->stacks.Bottom(thread_count);
  MakePlaces(place_count);
  return {};
}

void Simulation::MakePlaces(size_t count) {
  places_.resize(count);
  const uint32_t threads = grid_.threads_per_threadgroup_count;
  for (size_t slot = 0; slot < count; ++slot) {
    Threadgroup& place = places_[slot];
    place.slot = slot;
    place.arena = &memory_->threadgroups.arena(slot);
    place.threads = std::make_unique<Thread[]>(threads);
    for (uint32_t index = 0; index < threads; ++index) {
      Thread& thread = place.threads[index];
      thread.group = &place;
      thread.index = index;
      thread.stack = memory_->stacks.Bottom(slot * threads + index);
      thread.stack_bottom = reinterpret_cast<uintptr_t>(thread.stack);
    }
  }
}

void Simulation::DrawInterruption() {
  countdown_start_ = kAccessesPerTurn;
  if (InterruptsAtRandom()) countdown_start_ = random_.TrialsUntilSuccess(kAccessesPerTurn);
  countdown_ = countdown_start_;
}

/// Part of Run: a function of its own would return where the processor does not expect it.
inline __attribute__((always_inline)) void Simulation::TakeTurn(Thread* thread) {
  if (!InterruptsAtRandom()) countdown_ = kAccessesPerTurn;
  thread_ = thread;
  fiber_ = &thread->fiber;
  const bool ended = thread->fiber.Resume();
  thread_ = nullptr;
  fiber_ = nullptr;
  if (over_) return;
  Threadgroup* group = thread->group;
  if (ended) {
    thread->state = ThreadState::kEnded;
    --group->live;
    idle_steps_ = 0;
  }
  if (thread->state == ThreadState::kRunnable) return;
  --group->runnable;
  --group->simdgroups[thread->simdgroup()].runnable;
  switch (rendezvous_->Settle(group, thread->simdgroup())) {
    case Rendezvous::Outcome::kNothing:
      break;
    case Rendezvous::Outcome::kReleased:
      idle_steps_ = 0;
      break;
    case Rendezvous::Outcome::kDeadlock:
      over_ = true;
      break;
  }
}

void Simulation::Run() {
  const CrashGuard guard;
  Simulation* const outer = std::exchange(current_, this);
  DrawInterruption();
  while (!over_ && FillPlaces()) {
    CollectTurns();
    for (Thread* thread : turns_) {
      if (over_) break;
      if (thread->state == ThreadState::kRunnable) TakeTurn(thread);
    }
  }
  current_ = outer;
}

Report Simulation::Finish() {
  std::vector<ObservedAccess> observed;
  const auto observe = [&](const DeviceBuffer& buffer) {
    observed.push_back(
        {buffer.counters.name, buffer.origin, buffer.bytes, buffer.read, buffer.written});
  };
  for (const DeviceBuffer& buffer : memory_->device.buffers()) {
    counters_.buffers.push_back(buffer.Counted());
    const auto binding = launch_.buffers.find(buffer.index);
    if (buffer.bytes == 0 || binding == launch_.buffers.end()) continue;
    observe(buffer);
    if (!buffer.read_only) std::memcpy(binding->second.data, buffer.data, buffer.bytes);
  }
  for (const DeviceBuffer& piece : memory_->addressed.pieces()) observe(piece);
  return {log_.Take(), std::move(counters_), std::move(observed)};
}

// --- scheduling

bool Simulation::FillPlaces() {
  bool any = false;
  for (Threadgroup& place : places_) {
    if (place.live == 0 && next_threadgroup_ < grid_.threadgroup_count) {
      Begin(&place, NextThreadgroup());
    }
    any = any || place.live != 0;
  }
  return any && !over_;
}

uint32_t Simulation::NextThreadgroup() {
  const uint32_t position = next_threadgroup_++;
  return threadgroup_order_.empty() ? position : threadgroup_order_[position];
}

void Simulation::Begin(Threadgroup* group, uint32_t index) {
  group->index = index;
  group->position = PositionIn(grid_.threadgroups, index);
  const Triple full = grid_.threads_per_threadgroup;
  const auto rest = [](uint32_t size, uint32_t position, uint32_t grid) {
    return std::min(size, grid - position * size);
  };
  group->size = {rest(full.x, group->position.x, grid_.threads.x),
                 rest(full.y, group->position.y, grid_.threads.y),
                 rest(full.z, group->position.z, grid_.threads.z)};
  group->thread_count = group->size.x * group->size.y * group->size.z;
  group->live = group->runnable = group->thread_count;
  group->simdgroups.clear();
  for (uint32_t first = 0; first < group->thread_count; first += kSimdgroupThreads) {
    const uint32_t size = std::min(kSimdgroupThreads, group->thread_count - first);
    group->simdgroups.push_back({size, size});
  }
  const uintptr_t arena = group->arena->begin();
  if (order_.releases.used()) order_.releases.Forget(arena, arena + ThreadgroupArena::kBytes);
  group->arena->Clear();
  AddThreadgroupArguments(*group);
  AccessRecord device;
  AccessRecord threadgroup;
  device.group_epoch = order_.epochs.NextOfDevice(index);
  threadgroup.group_epoch = group->first_epoch = order_.epochs.NextOfThreadgroup();
  for (uint32_t i = 0; i < group->thread_count; ++i) {
    group->threads[i].stamps = {device, threadgroup};
    BeginThread(group, i);
  }
  ++counters_.threadgroups;
  counters_.threads += group->thread_count;
}

void Simulation::BeginThread(Threadgroup* group, uint32_t index) {
  Thread& thread = group->threads[index];
  thread.position = PositionIn(group->size, index);
  thread.state = ThreadState::kRunnable;
  for (AccessRecord& stamp : thread.stamps) stamp.thread = index & 1023U;
  // Stacks that all end at one offset in a page would fight for the same lines of the cache.
  const size_t offset = index * kStackStagger % kStackStaggers;
  thread.fiber.Start(thread.stack, memory_->stacks.usable_bytes() - offset, RunKernel);
}

void Simulation::AddThreadgroupArguments(const Threadgroup& group) {
  for (const auto& [index, bytes] : launch_.threadgroup_memory) {
    const char* name = "threadgroup memory";
    for (int i = 0; i < kernel_.argument_count; ++i) {
      const Argument& argument = kernel_.arguments[i];
      if (argument.source == Source::kThreadgroupMemory && argument.index == index) {
        name = argument.name;
      }
    }
    thread_ = &group.threads[0];
    if (ThreadgroupVariable(ArgumentId(index), static_cast<size_t>(bytes), 16, name) == nullptr) {
      over_ = true;
    }
    thread_ = nullptr;
  }
}

void Simulation::CollectTurns() {
  turns_.clear();
  for (Threadgroup& place : places_) {
    if (place.live == 0) continue;
    for (uint32_t index = 0; index < place.thread_count; ++index) {
      Thread& thread = place.threads[index];
      if (thread.state == ThreadState::kRunnable) turns_.push_back(&thread);
    }
  }
  if (options_.seed == 0) return;
  for (auto count = static_cast<uint32_t>(turns_.size()); count > 1; --count) {
    std::swap(turns_[count - 1], turns_[random_.Below(count)]);
  }
}

void Simulation::RunCollective(Thread& first, void* const* data, uint32_t lanes) {
  collective_ = {data, lanes};
  thread_ = &first;
  fiber_ = &collective_fiber_;
  collective_fiber_.Start(collective_stack_, memory_->stacks.usable_bytes(), RunCollectiveFunction);
  collective_fiber_.Resume();
  thread_ = nullptr;
  fiber_ = nullptr;
}

// --- on a fiber

void Simulation::RunKernel() { current_->kernel_.run(); }

void Simulation::RunCollectiveFunction() {
  const Simulation& self = *current_;
  const Waiting& waiting = self.thread_->waiting;
  waiting.function(self.collective_.data, self.collective_.lanes, waiting.context);
}

void Simulation::EndLaunch() {
  over_ = true;
  for (;;) fiber_->GiveWay();
}

void Simulation::GiveWayIdly(int64_t steps, const void* site) {
  idle_steps_ += steps;
  if (idle_steps_ > options_.step_limit) {
    if (log_.Count(FindingKind::kDeadlock, site, nullptr)) {
      log_.Describe(
          fmt::format("no thread ended or passed a barrier in {} turns; {} of {} "
                      "threadgroups had begun, {} runs in a loop: the launch ends here",
                      options_.step_limit, next_threadgroup_, grid_.threadgroup_count,
                      checker_->ThreadText(thread_->group->index, thread_->index)));
    }
    EndLaunch();
  }
  fiber_->GiveWay();
}

void Simulation::Interrupt() {
  // Short turns are counted by their accesses, so that preemption does not use the limit up.
  idle_accesses_ += countdown_start_;
  const int64_t steps = idle_accesses_ / kAccessesPerTurn;
  idle_accesses_ %= kAccessesPerTurn;
  DrawInterruption();
  GiveWayIdly(steps, nullptr);
}

void Simulation::Atomic(const MemoryAccess& access, int order) {
  if (thread_ == nullptr) return;
  if (access.address - thread_->stack_bottom < memory_->stacks.usable_bytes()) return;
  ++counters_.atomics;
  // Loops that wait for others consist of atomic operations: each lets the others run.
  if (fiber_ != &collective_fiber_) GiveWayIdly(1, access.site);
  if (!checker_->Check(*thread_, access)) EndLaunch();
  if (order != kRelaxed && options_.msl_version < 410) {
    if (log_.Count(FindingKind::kUnsupportedOrder, access.site, nullptr)) {
      log_.Describe(
          fmt::format("an atomic operation other than memory_order_relaxed needs MSL "
                      "4.1, this is {}.{}; taken as relaxed",
                      options_.msl_version / 100, options_.msl_version / 10 % 10));
    }
    order = kRelaxed;
  }
  order_.releases.Atomic(thread_->Ordered(), access.address, access.reads, access.writes, order);
}

void Simulation::Fence(uint32_t flags, int order, int scope, const void* site) {
  if (thread_ == nullptr) return;
  if (options_.msl_version < 320) {
    if (log_.Count(FindingKind::kUnsupportedOrder, site, nullptr)) {
      log_.Describe(fmt::format("atomic_thread_fence needs MSL 3.2, this is {}.{}; ignored",
                                options_.msl_version / 100, options_.msl_version / 10 % 10));
    }
    return;
  }
  order_.releases.Fence(thread_->Ordered(), flags, order, scope);
}

void Simulation::Fault(const char* what, const void* site) {
  if (thread_ == nullptr) return;
  if (log_.Count(FindingKind::kUndefinedOperation, site, nullptr)) {
    log_.Describe(fmt::format("{} by {}: the launch ends here", what,
                              checker_->ThreadText(thread_->group->index, thread_->index)));
  }
  EndLaunch();
}

void Simulation::ReportUndefined(const char* what) {
  if (thread_ == nullptr) return;
  const Waiting& waiting = thread_->waiting;
  if (!log_.Count(FindingKind::kUndefinedOperation, waiting.site, nullptr)) return;
  log_.Describe(fmt::format("{}: {}, in the simdgroup of {}", waiting.name, what,
                            checker_->ThreadText(thread_->group->index, thread_->index)));
}

void Simulation::Crash(const CrashSite& crash) {
  const bool beyond = crash.cause == CrashSite::Cause::kBounds;
  const FindingKind kind = beyond ? FindingKind::kOutOfBounds : FindingKind::kWildAccess;
  if (log_.Count(kind, crash.site, nullptr)) {
    log_.Describe(fmt::format("{} by {}: the launch ends here",
                              beyond ? "access beyond the end of a private variable"
                                     : "access of memory that is not there",
                              checker_->ThreadText(thread_->group->index, thread_->index)));
  }
  EndLaunch();
}

void Simulation::CountMatrixOperation(uint64_t multiply_adds) {
  ++counters_.matrix_operations;
  counters_.multiply_adds += static_cast<int64_t>(multiply_adds);
}

// --- calls from a thread

void* Simulation::Buffer(int index) const {
  const DeviceBuffer* buffer = memory_->device.Find(index);
  return buffer == nullptr ? nullptr : buffer->data;
}

void* Simulation::ThreadgroupArgument(int index) const {
  return thread_ == nullptr ? nullptr : thread_->group->arena->Find(ArgumentId(index));
}

void* Simulation::ThreadgroupVariable(int id, size_t bytes, size_t alignment, const char* name) {
  if (thread_ == nullptr) return nullptr;
  ThreadgroupArena& arena = *thread_->group->arena;
  void* known = arena.Find(id);
  if (known != nullptr) return known;
  void* added = arena.Add(id, bytes, alignment, name);
  const auto used = static_cast<int64_t>(arena.variable_bytes() + (added == nullptr ? bytes : 0));
  counters_.threadgroup_bytes = std::max(counters_.threadgroup_bytes, used);
  if (used > options_.threadgroup_memory_limit || added == nullptr) {
    if (log_.Count(FindingKind::kThreadgroupMemoryLimit, nullptr, nullptr)) {
      log_.Describe(fmt::format("{} ({} bytes) makes {} bytes of threadgroup memory, at most {}",
                                name, bytes, used, options_.threadgroup_memory_limit));
    }
  }
  // Before the first turn there is no fiber to leave; the caller ends the launch.
  if (added == nullptr && fiber_ != nullptr) EndLaunch();
  return added;
}

Triple Simulation::Position(Source source) const {
  if (thread_ == nullptr) return {};
  const Threadgroup& group = *thread_->group;
  const Triple full = grid_.threads_per_threadgroup;
  const Triple& own = thread_->position;
  const auto simdgroups = static_cast<uint32_t>(group.simdgroups.size());
  switch (source) {
    case Source::kThreadPositionInGrid:
      return {group.position.x * full.x + own.x, group.position.y * full.y + own.y,
              group.position.z * full.z + own.z};
    case Source::kThreadPositionInThreadgroup:
      return own;
    case Source::kThreadgroupPositionInGrid:
      return group.position;
    case Source::kThreadIndexInThreadgroup:
      return {thread_->index, 0, 0};
    case Source::kThreadIndexInSimdgroup:
      return {thread_->lane(), 0, 0};
    case Source::kSimdgroupIndexInThreadgroup:
      return {thread_->simdgroup(), 0, 0};
    case Source::kThreadIndexInQuadgroup:
      return {thread_->index % 4, 0, 0};
    case Source::kQuadgroupIndexInThreadgroup:
      return {thread_->index / 4, 0, 0};
    case Source::kThreadsPerThreadgroup:
      return group.size;
    case Source::kThreadsPerGrid:
      return grid_.threads;
    case Source::kThreadgroupsPerGrid:
      return grid_.threadgroups;
    case Source::kSimdgroupsPerThreadgroup:
      return {simdgroups, 0, 0};
    case Source::kThreadsPerSimdgroup:
      return {kSimdgroupThreads, 0, 0};
    case Source::kDispatchThreadsPerThreadgroup:
      return full;
    case Source::kBuffer:
    case Source::kThreadgroupMemory:
      break;
  }
  return {};
}

uint32_t Simulation::Lane() const { return thread_ == nullptr ? 0 : thread_->lane(); }

}  // namespace metal_sim
