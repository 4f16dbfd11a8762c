// Fibers: the threads of a kernel, as stacks that one thread of the operating system switches
// between. Must not know their code or their schedule.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>

#include "metal_sim/mapped_memory.h"

// g++ defines __SANITIZE_*__; clang answers __has_feature.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define METAL_SIM_FIBERS_UNDER_ASAN
#endif
#if __has_feature(thread_sanitizer)
#define METAL_SIM_FIBERS_UNDER_TSAN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define METAL_SIM_FIBERS_UNDER_ASAN
#endif
#if defined(__SANITIZE_THREAD__)
#define METAL_SIM_FIBERS_UNDER_TSAN
#endif
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(METAL_SIM_FIBERS_UNDER_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace metal_sim {

/// The stacks of a number of fibers, in one piece, each with a page below it that cannot be
/// accessed. Serves one launch after the other: to map the pages takes longer than many launches.
class FiberStacks {
 public:
  FiberStacks() = default;
  ~FiberStacks() { Release(); }
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  /// Makes sure that there are `count`; fibers that exist stay. Errors: kOutOfMemory.
  Status Place(size_t count);

  /// The lowest usable address of a stack.
  std::byte* Bottom(size_t index) const { return memory_.data() + index * stride_ + guard_; }
  /// How many bytes are usable from there.
  size_t usable_bytes() const { return stride_ - guard_; }
  bool Contains(uintptr_t address) const { return address - memory_.address() < memory_.size(); }

 private:
  void Release();

  MappedMemory memory_;
  size_t count_ = 0;
  size_t stride_ = 0;
  size_t guard_ = 0;
};

/// One fiber. It may be started again when it has ended, and also when it has not: then it is left
/// for good where it gave way, without destructors, which kernels do not have.
class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes the next Resume call `entry` on the stack [bottom, bottom + bytes).
  void Start(std::byte* bottom, size_t bytes, void (*entry)());
  /// Runs the fiber until it gives way or ends. Returns whether it has ended.
  bool Resume();
  /// Called on the fiber: returns to the caller of Resume.
  void GiveWay();

 private:
  struct Switch;  ///< Boost's side of it.

  void (*entry_)() = nullptr;
  void* context_ = nullptr;  ///< Where to go on; while the fiber runs, where it was resumed.
  bool ended_ = false;

  // Used only in builds with a sanitizer, which must be told of every switch.
  [[maybe_unused]] void* sanitizer_fiber_ = nullptr;
  [[maybe_unused]] void* sanitizer_caller_ = nullptr;
  [[maybe_unused]] const void* caller_bottom_ = nullptr;
  [[maybe_unused]] size_t caller_bytes_ = 0;
  std::byte* bottom_ = nullptr;
  size_t bytes_ = 0;
};

// Inline, as their callers are: after a switch the processor mispredicts every return.
inline bool Fiber::Resume() {
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, bottom_, bytes_);
#endif
#if defined(METAL_SIM_FIBERS_UNDER_TSAN)
  sanitizer_caller_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(sanitizer_fiber_, 0);
#endif
  context_ = boost::context::detail::jump_fcontext(context_, this).fctx;
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  return ended_;
}

inline void Fiber::GiveWay() {
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(ended_ ? nullptr : &fake_stack, caller_bottom_, caller_bytes_);
#endif
#if defined(METAL_SIM_FIBERS_UNDER_TSAN)
  __tsan_switch_to_fiber(sanitizer_caller_, 0);
#endif
  context_ = boost::context::detail::jump_fcontext(context_, this).fctx;
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack, &caller_bottom_, &caller_bytes_);
#endif
}

}  // namespace metal_sim
