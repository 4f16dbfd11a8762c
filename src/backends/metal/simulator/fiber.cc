#include "backends/metal/simulator/fiber.h"

#include <boost/context/detail/fcontext.hpp>

#include "base/macros.h"

// g++ defines __SANITIZE_*__; clang answers __has_feature.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MARLIN_FIBERS_UNDER_ASAN
#endif
#if __has_feature(thread_sanitizer)
#define MARLIN_FIBERS_UNDER_TSAN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define MARLIN_FIBERS_UNDER_ASAN
#endif
#if defined(__SANITIZE_THREAD__)
#define MARLIN_FIBERS_UNDER_TSAN
#endif
#if defined(MARLIN_FIBERS_UNDER_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(MARLIN_FIBERS_UNDER_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace marlin::metal::simulator {
namespace {

namespace context = boost::context::detail;

/// Enough for kernels built without optimisation; only what is touched takes memory.
constexpr size_t kStackBytes = size_t{256} << 10;

}  // namespace

Result<FiberStacks> FiberStacks::Allocate(size_t count) {
  FiberStacks stacks;
  stacks.guard_ = MappedMemory::WholePages(1);
  stacks.stride_ = stacks.guard_ + kStackBytes;
  MARLIN_ASSIGN_OR_RETURN(stacks.memory_, MappedMemory::Reserve(count * stacks.stride_));
  for (size_t index = 0; index < count; ++index) {
    const size_t offset = index * stacks.stride_ + stacks.guard_;
    MARLIN_RETURN_IF_ERROR(stacks.memory_.Open(offset, kStackBytes));
  }
  return stacks;
}

struct Fiber::Switch {
  /// The first thing that runs on a fiber's stack.
  static void Enter(context::transfer_t transfer) {
    auto& fiber = *static_cast<Fiber*>(transfer.data);
    fiber.context_ = transfer.fctx;
#if defined(MARLIN_FIBERS_UNDER_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &fiber.caller_bottom_, &fiber.caller_bytes_);
#endif
    fiber.entry_();
    fiber.ended_ = true;
    fiber.GiveWay();
  }
};

Fiber::~Fiber() {
#if defined(MARLIN_FIBERS_UNDER_TSAN)
  if (sanitizer_fiber_ != nullptr) __tsan_destroy_fiber(sanitizer_fiber_);
#endif
}

void Fiber::Start(std::byte* bottom, size_t bytes, void (*entry)()) {
  entry_ = entry;
  ended_ = false;
  bottom_ = bottom;
  bytes_ = bytes;
  context_ = context::make_fcontext(bottom + bytes, bytes, Switch::Enter);
#if defined(MARLIN_FIBERS_UNDER_ASAN)
  // What an earlier fiber left on the stack must not be held against this one.
  __asan_unpoison_memory_region(bottom, bytes);
#endif
#if defined(MARLIN_FIBERS_UNDER_TSAN)
  if (sanitizer_fiber_ != nullptr) __tsan_destroy_fiber(sanitizer_fiber_);
  sanitizer_fiber_ = __tsan_create_fiber(0);
#endif
}

bool Fiber::Resume() {
#if defined(MARLIN_FIBERS_UNDER_ASAN)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, bottom_, bytes_);
#endif
#if defined(MARLIN_FIBERS_UNDER_TSAN)
  sanitizer_caller_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(sanitizer_fiber_, 0);
#endif
  context_ = context::jump_fcontext(context_, this).fctx;
#if defined(MARLIN_FIBERS_UNDER_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  return ended_;
}

void Fiber::GiveWay() {
#if defined(MARLIN_FIBERS_UNDER_ASAN)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(ended_ ? nullptr : &fake_stack, caller_bottom_, caller_bytes_);
#endif
#if defined(MARLIN_FIBERS_UNDER_TSAN)
  __tsan_switch_to_fiber(sanitizer_caller_, 0);
#endif
  context_ = context::jump_fcontext(context_, this).fctx;
#if defined(MARLIN_FIBERS_UNDER_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack, &caller_bottom_, &caller_bytes_);
#endif
}

}  // namespace marlin::metal::simulator
