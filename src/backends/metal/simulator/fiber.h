// Fibers: the threads of a kernel, as stacks that one thread of the operating system switches
// between. Must not know what runs on them or in which order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/metal/simulator/mapped_memory.h"

namespace marlin::metal::simulator {

/// The stacks of a fixed number of fibers, in one piece, each with a page below it that cannot be
/// accessed.
class FiberStacks {
 public:
  /// Errors: kOutOfMemory.
  static Result<FiberStacks> Allocate(size_t count);

  /// The lowest usable address of a stack.
  std::byte* Bottom(size_t index) const { return memory_.data() + index * stride_ + guard_; }
  /// How many bytes are usable from there.
  size_t usable_bytes() const { return stride_ - guard_; }
  bool Contains(uintptr_t address) const { return address - memory_.address() < memory_.size(); }

 private:
  MappedMemory memory_;
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
  /// Called on the fiber: goes back to who resumed it.
  void GiveWay();

 private:
  struct Switch;  ///< Boost's side of it.

  void (*entry_)() = nullptr;
  void* context_ = nullptr;  ///< Where to go on; while the fiber runs, where it was resumed.
  bool ended_ = false;

  // Of use only in builds with a sanitizer, which must be told of every switch.
  [[maybe_unused]] void* sanitizer_fiber_ = nullptr;
  [[maybe_unused]] void* sanitizer_caller_ = nullptr;
  [[maybe_unused]] const void* caller_bottom_ = nullptr;
  [[maybe_unused]] size_t caller_bytes_ = 0;
  std::byte* bottom_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace marlin::metal::simulator
