#include "metal_sim/fiber.h"

namespace metal_sim {
namespace {

/// Enough for kernels built without optimisation; only touched pages take memory.
constexpr size_t kStackBytes = size_t{256} << 10;

}  // namespace

Status FiberStacks::Place(size_t count) {
  if (count <= count_) return {};
  Release();
  guard_ = MappedMemory::WholePages(1);
  stride_ = guard_ + kStackBytes;
  METAL_SIM_ASSIGN_OR_RETURN(memory_, MappedMemory::Reserve(count * stride_));
  for (size_t index = 0; index < count; ++index) {
    METAL_SIM_RETURN_IF_ERROR(memory_.Open(index * stride_ + guard_, kStackBytes));
  }
  count_ = count;
  return {};
}

void FiberStacks::Release() {
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
  // Frames of fibers never return, so their poison would stay for whatever is mapped here next.
  for (size_t index = 0; index < count_; ++index) {
    __asan_unpoison_memory_region(Bottom(index), usable_bytes());
  }
#endif
  count_ = 0;
  memory_ = MappedMemory();
}

struct Fiber::Switch {
  /// The first thing that runs on a fiber's stack.
  static void Enter(boost::context::detail::transfer_t transfer) {
    auto& fiber = *static_cast<Fiber*>(transfer.data);
    fiber.context_ = transfer.fctx;
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &fiber.caller_bottom_, &fiber.caller_bytes_);
#endif
    fiber.entry_();
    fiber.ended_ = true;
    fiber.GiveWay();
  }
};

Fiber::~Fiber() {
#if defined(METAL_SIM_FIBERS_UNDER_TSAN)
  if (sanitizer_fiber_ != nullptr) __tsan_destroy_fiber(sanitizer_fiber_);
#endif
}

void Fiber::Start(std::byte* bottom, size_t bytes, void (*entry)()) {
  entry_ = entry;
  ended_ = false;
  bottom_ = bottom;
  bytes_ = bytes;
  context_ = boost::context::detail::make_fcontext(bottom + bytes, bytes, Switch::Enter);
#if defined(METAL_SIM_FIBERS_UNDER_ASAN)
  // Poison left on the stack by an earlier fiber is not an error of this one.
  __asan_unpoison_memory_region(bottom, bytes);
#endif
#if defined(METAL_SIM_FIBERS_UNDER_TSAN)
  if (sanitizer_fiber_ != nullptr) __tsan_destroy_fiber(sanitizer_fiber_);
  sanitizer_fiber_ = __tsan_create_fiber(0);
#endif
}

}  // namespace metal_sim
