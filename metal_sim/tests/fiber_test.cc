// Stacks of fibers, and what they leave in the address space.
#include "metal_sim/fiber.h"

#include <gtest/gtest.h>

#include <cstring>

#include "metal_sim/mapped_memory.h"

namespace metal_sim::fiber_test {
namespace {

constexpr size_t kFibers = 8;

Fiber* running = nullptr;

// Kept out of line: its frame holds an array, around which AddressSanitizer poisons the stack.
[[gnu::noinline]] void GiveWayWithAnArray() {
  volatile char array[100] = {};
  running->GiveWay();
  array[0] = 1;
}

size_t RunFibersAndLeaveHalf() {
  FiberStacks stacks;
  EXPECT_TRUE(stacks.Place(kFibers).ok());
  Fiber fibers[kFibers];
  for (size_t i = 0; i < kFibers; ++i) {
    running = &fibers[i];
    running->Start(stacks.Bottom(i), stacks.usable_bytes(), GiveWayWithAnArray);
    EXPECT_FALSE(running->Resume());
    if (i % 2 == 0) EXPECT_TRUE(running->Resume());
  }
  return kFibers * (stacks.Bottom(1) - stacks.Bottom(0));
}

// The operating system hands out the same addresses again. Frames that were left on the stacks
// must not make AddressSanitizer report accesses to what is mapped there next.
TEST(FiberStacks, LeaveNoPoisonInTheAddressSpace) {
  const size_t bytes = RunFibersAndLeaveHalf();
  const auto memory = MappedMemory::Allocate(bytes);
  ASSERT_TRUE(memory.ok());
  std::memset(memory->data(), 1, bytes);
  EXPECT_EQ(memory->data()[bytes - 1], std::byte{1});
}

TEST(FiberStacks, GrowBetweenLaunches) {
  FiberStacks stacks;
  for (const size_t count : {1, 4, 2, 8}) {
    ASSERT_TRUE(stacks.Place(count).ok());
    for (size_t i = 0; i < count; ++i) {
      Fiber fiber;
      running = &fiber;
      fiber.Start(stacks.Bottom(i), stacks.usable_bytes(), GiveWayWithAnArray);
      EXPECT_FALSE(fiber.Resume());
      EXPECT_TRUE(fiber.Resume());
      EXPECT_TRUE(stacks.Contains(reinterpret_cast<uintptr_t>(stacks.Bottom(i))));
    }
  }
}

}  // namespace
}  // namespace metal_sim::fiber_test
