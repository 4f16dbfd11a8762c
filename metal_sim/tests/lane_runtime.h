// The smallest simulator that the shim can run on: up to 32 lanes of one simdgroup as fibers, in
// turn, without a check; it records the calls. For tests of the shim alone.
#pragma once

#include <ucontext.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "metal_sim/shim/abi.h"

namespace metal_sim {

struct RecordedAccess {
  const void* address;
  size_t bytes;
  bool write;
  const void* site;
};

/// One launch at a time, on one thread: the table of functions has no context.
class LaneRuntime {
 public:
  static const Runtime* Table();

  /// Runs `kernel` as `lanes` lanes with buffers 0 and 1.
  static void Run(const Kernel& kernel, void* out, void* in, int lanes) {
    LaneRuntime& runtime = Current();
    runtime = LaneRuntime();
    runtime.buffers_[0] = out;
    runtime.buffers_[1] = in;
    runtime.kernel_ = &kernel;
    runtime.lanes_.resize(static_cast<size_t>(lanes));
    for (Lane& lane : runtime.lanes_) {
      lane.stack.resize(1 << 18);
      MakeReady(&lane, &runtime.scheduler_);
    }
    runtime.Schedule();
  }

  static LaneRuntime& Current() {
    static LaneRuntime runtime;
    return runtime;
  }

  // The record of the last launch.
  std::vector<RecordedAccess> accesses;
  std::vector<std::string> events;  ///< Barriers, fences, collectives: one per lane.
  std::vector<const void*> sites;   ///< The sites of the events.
  uint64_t multiply_adds = 0;

 private:
  struct Lane {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    bool waiting = false;
    void* data = nullptr;
    Collective function = nullptr;
    void* function_context = nullptr;
  };

  /// A function of its own: getcontext may return twice, as far as the compiler knows.
  [[gnu::noinline]] static void MakeReady(Lane* lane, ucontext_t* scheduler) {
    getcontext(&lane->context);
    lane->context.uc_stack.ss_sp = lane->stack.data();
    lane->context.uc_stack.ss_size = lane->stack.size();
    lane->context.uc_link = scheduler;
    makecontext(&lane->context, &LaneRuntime::Enter, 0);
  }

  static void Enter() {
    LaneRuntime& runtime = Current();
    runtime.kernel_->run();
    runtime.lanes_[runtime.current_].done = true;
  }

  /// Rounds: every lane runs until it waits or ends; then those that wait have met.
  void Schedule() {
    for (bool ran = true; ran;) {
      ran = false;
      for (current_ = 0; current_ < lanes_.size(); ++current_) {
        if (lanes_[current_].done) continue;
        ran = true;
        lanes_[current_].waiting = false;
        swapcontext(&scheduler_, &lanes_[current_].context);
      }
      Meet();
    }
  }

  void Meet() {
    void* data[32] = {};
    uint32_t active = 0;
    const Lane* last = nullptr;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (!lanes_[i].waiting || lanes_[i].function == nullptr) continue;
      data[i] = lanes_[i].data;
      active |= 1u << i;
      last = &lanes_[i];
    }
    if (last != nullptr) last->function(data, active, last->function_context);
  }

  void Wait(const std::string& event, const void* site, void* data = nullptr,
            Collective function = nullptr, void* function_context = nullptr) {
    events.push_back(event);
    sites.push_back(site);
    Lane& lane = lanes_[current_];
    lane.waiting = true;
    lane.data = data;
    lane.function = function;
    lane.function_context = function_context;
    swapcontext(&lane.context, &scheduler_);
  }

  void* buffers_[2] = {};
  const Kernel* kernel_ = nullptr;
  std::vector<Lane> lanes_;
  size_t current_ = 0;
  ucontext_t scheduler_;
  std::map<int, std::vector<char>> variables_;
};

inline const Runtime* LaneRuntime::Table() {
  static const Runtime table = {
      .buffer = [](int index) { return Current().buffers_[index]; },
      .threadgroup_memory = [](int) -> void* { return nullptr; },
      .threadgroup_variable = [](int id, size_t bytes, size_t, const char*) -> void* {
        auto& storage = Current().variables_[id];
        if (storage.size() < bytes) storage.resize(bytes);
        return storage.data();
      },
      .position =
          [](Source) {
            return Triple{static_cast<uint32_t>(Current().current_), 0, 0};
          },
      .lane = [] { return static_cast<uint32_t>(Current().current_); },
      .threadgroup_barrier =
          [](uint32_t flags, const void* site) {
            Current().Wait("threadgroup_barrier " + std::to_string(flags), site);
          },
      .simdgroup_barrier =
          [](uint32_t flags, const void* site) {
            Current().Wait("simdgroup_barrier " + std::to_string(flags), site);
          },
      .collective =
          [](void* data, Collective function, void* context, const char* name, bool whole,
             const void* site) {
            Current().Wait(std::string(name) + (whole ? " whole" : ""), site, data, function,
                           context);
          },
      .access =
          [](const void* address, size_t bytes, bool write, const void* site) {
            Current().accesses.push_back({address, bytes, write, site});
          },
      .atomic =
          [](const void*, size_t bytes, bool read, bool write, int order, const void* site) {
            Current().events.push_back("atomic " + std::to_string(bytes) + (read ? "r" : "") +
                                       (write ? "w" : "") + " " + std::to_string(order));
            Current().sites.push_back(site);
          },
      .fence =
          [](uint32_t flags, int order, int scope, const void* site) {
            Current().events.push_back("fence " + std::to_string(flags) + " " +
                                       std::to_string(order) + " " + std::to_string(scope));
            Current().sites.push_back(site);
          },
      .count_matrix_operation = [](uint64_t count) { Current().multiply_adds += count; },
      .fault = [](const char* what, const void*) { Current().events.emplace_back(what); },
  };
  return &table;
}

}  // namespace metal_sim
