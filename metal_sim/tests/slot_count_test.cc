// The costs of instructions, by their text and by kernels whose loops differ in one operation.
#include "metal_sim/slot_count.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "metal_program_fixture.h"

namespace metal_sim::slot_count_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CountBlocksTest, CostsEveryBlock) {
  const SlotModule module = CountBlocks(R"(define i32 @kernel(ptr %0, i32 %1) #0 {
  %3 = zext i32 %1 to i64
  %4 = getelementptr i32, ptr %0, i64 %3
  %5 = load i32, ptr %4, align 4
  %6 = getelementptr inbounds i8, ptr %4, i64 4
  %7 = load i32, ptr %6, align 4
  %8 = getelementptr inbounds i8, ptr %4, i64 16
  %9 = load i32, ptr %8, align 4
  br label %10

10:                                               ; preds = %10, %2
  %11 = phi i32 [ %5, %2 ], [ %18, %10 ]
  %12 = shl i32 %11, 1
  %13 = shl i32 %12, 3
  %14 = lshr i32 %13, 16
  %15 = trunc i32 %14 to i16
  %16 = mul i32 %13, %9
  %17 = udiv i32 %16, %7
  %18 = add i32 %17, 1
  %19 = add i64 %3, 1
  %20 = icmp slt i32 %18, 9
  br i1 %20, label %10, label %21

21:                                               ; preds = %10
  ret i32 %18
}
define void @helper() #1 {
  ret void
}
attributes #0 = { mustprogress }
attributes #1 = { noinline disable_sanitizer_instrumentation }
)");
  // Two vectors; 1 + 4 + 0 + 4 + 32 + 1 + 4 + 1 + 1; nothing.
  EXPECT_THAT(module.costs, ElementsAre(2, 48, 0));
  EXPECT_THAT(module.text, HasSubstr("@metal_sim_slot_costs = constant [3 x i64] [i64 2, i64 48, "
                                     "i64 0]"));
}

TEST(CountBlocksTest, SumsTheRunsOnce) {
  const int64_t blocks = 2;
  const std::vector<int64_t> costs = {3, 5};
  std::vector<int64_t> runs = {10, 2};
  const SlotVariables variables = {&blocks, costs.data(), runs.data()};
  EXPECT_EQ(variables.Take(), 40);
  EXPECT_EQ(variables.Take(), 0);
  EXPECT_EQ(SlotVariables().Take(), 0);
}

constexpr std::string_view kLoop = R"(
kernel void loop(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]],
                 uint i [[thread_position_in_threadgroup]]) {
  uint x = in[i];
  #pragma clang loop unroll(disable)
  for (uint j = 0; j < in[64]; ++j) x = (x OPERATION) ^ j;
  out[i] = x;
}
)";

class SlotsOfKernels : public MetalProgramTest {
 protected:
  int64_t SlotsOf(const std::string& operation) {
    CompileOptions options;
    options.defines = {"OPERATION=" + operation};
    options.count_slots = true;
    Compile(kLoop, options);
    std::vector<uint32_t> in(65, 100);
    std::vector<uint32_t> out(64);
    Launch launch = OneThreadgroup(64);
    Bind(0, &in, &launch);
    Bind(1, &out, &launch);
    EXPECT_TRUE(Run("loop", launch).clean());
    return program_ == nullptr ? 0 : program_->TakeSlots();
  }
};

TEST_F(SlotsOfKernels, AreThoseOfAllThreadsAndTurns) {
  const int64_t sums = SlotsOf("+ 3");
  EXPECT_EQ(SlotsOf("* 3") - sums, 64 * 100 * 3);
  EXPECT_EQ(SlotsOf(">> 3") - sums, 64 * 100 * 3);
}

}  // namespace
}  // namespace metal_sim::slot_count_test
