#include "backends/metal/plan/kernel_body.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace marlin::metal::kernel_body_test {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;

KernelBody Body(std::string_view file, std::string_view function) {
  auto body = BodyOfKernel(file, function, {});
  EXPECT_TRUE(body.ok()) << body.status().message();
  return body.ok() ? *std::move(body) : KernelBody();
}

TEST(KernelBodyTest, DeclaresWhatTheKernelHas) {
  const KernelBody body = Body("gemv.metal", "marlin_gemv_4");
  EXPECT_THAT(body.template_arguments, ElementsAre(Pair("kRows", "4"), Pair("kStrips", "1")));
  EXPECT_THAT(body.source, HasSubstr("device const uchar* input = (device const uchar*)"
                                     "(marlin_input);\n"));
  EXPECT_THAT(body.source, HasSubstr("const Parameters p = *(const device Parameters*)"
                                     "(marlin_p);\n"));
  EXPECT_THAT(body.source,
              HasSubstr("const uint2 group = uint2(threadgroup_position_in_grid.xy);\n"));
  EXPECT_THAT(body.source,
              HasSubstr("const ushort simdgroups = ushort(simdgroups_per_threadgroup);\n"));
  EXPECT_THAT(body.source, HasSubstr("\n  threadgroup float sums["));
  EXPECT_THAT(body.source, HasSubstr("  Gemv<kRows, kStrips>("));
  EXPECT_THAT(body.source, Not(HasSubstr("[[")));
  EXPECT_THAT(body.header, StartsWith("#line 1 \"backends/metal/kernels/gemm/gemv.h\"\n"));
  EXPECT_THAT(body.header, Not(HasSubstr("[[kernel]]")));
  ASSERT_EQ(body.arguments.size(), 9U);
  EXPECT_EQ(body.arguments[5].name, "marlin_out");
  EXPECT_EQ(body.arguments[5].index, MARLIN_BUFFER_OUTPUT);
  for (const KernelArgument& argument : body.arguments) {
    EXPECT_EQ(argument.written, argument.index == MARLIN_BUFFER_OUTPUT) << argument.name;
  }
}

TEST(KernelBodyTest, FindsInstancesOfTemplates) {
  EXPECT_THAT(Body("gemm_staged.metal", "marlin_gemm_staged_2xbf16").template_arguments,
              ElementsAre(Pair("T", "bfloat"), Pair("kBuffers", "2")));
  EXPECT_THAT(Body("gemm_direct.metal", "marlin_gemm_direct_32x64").template_arguments,
              ElementsAre(Pair("kRowFragments", "4"), Pair("kStrips", "2"),
                          Pair("kSimdgroupColumns", "4")));
  EXPECT_THAT(Body("gemm_staged.metal", "marlin_gemm_staged_1xf32").source,
              HasSubstr("const uint group = uint(threadgroup_position_in_grid.x);\n"));
}

TEST(KernelBodyTest, TakesKernelsThatAreNoTemplates) {
  const KernelBody body = Body("finish.metal", "marlin_finish");
  EXPECT_THAT(body.template_arguments, IsEmpty());
  EXPECT_EQ(body.arguments[0].index, MARLIN_BUFFER_PARTIALS);
  EXPECT_THAT(body.source, HasSubstr("Finish(partials, output, position, p);\n"));
  EXPECT_THAT(Body("dequantize.metal", "marlin_dequantize").template_arguments, IsEmpty());
}

TEST(KernelBodyTest, KeepsWhatTheKernelIncludes) {
  const KernelBody body = Body("self_test.metal", "marlin_self_test");
  EXPECT_THAT(body.header, StartsWith("#include <metal_simdgroup_matrix>\n#line 1 "));
  EXPECT_THAT(body.header, EndsWith("#line 1 \"marlin_self_test\"\n"));
}

TEST(KernelBodyTest, RefusesWhatIsNotThere) {
  EXPECT_FALSE(BodyOfKernel("gemv.metal", "marlin_gemv_3", {}).ok());
  EXPECT_FALSE(BodyOfKernel("gemv.metal", "marlin_gemv", {}).ok());
  EXPECT_FALSE(BodyOfKernel("gemm.metal", "marlin_gemv_1", {}).ok());
}

}  // namespace
}  // namespace marlin::metal::kernel_body_test
