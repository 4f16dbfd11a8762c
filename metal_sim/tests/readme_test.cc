// The example of README.md: tests/examples/documents_test.py of the project compares its lines.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <vector>

#include "metal_program_fixture.h"
#include "metal_sim/launch.h"
#include "metal_sim/metal_program.h"

namespace metal_sim::readme_test {
namespace {

using Readme = MetalProgramTest;

TEST_F(Readme, SumsAndFindsNothing) {
  Write(R"(
kernel void sum(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                uint i [[thread_position_in_threadgroup]]) {
  threadgroup float part[64];
  part[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint j = 0; i == 0 && j < 64; ++j) out[0] += part[j];
}
)");
  std::filesystem::rename(path_, path_.parent_path() / "sum.metal");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(path_.parent_path());
  std::vector<float> in(64);
  std::iota(in.begin(), in.end(), 1.0F);
  std::array<float, 1> out = {0};

  auto program = metal_sim::MetalProgram::Compile("sum.metal", {});
  std::filesystem::current_path(before);
  ASSERT_TRUE(program.ok()) << program.status().message();
  auto kernel = (*program)->Find("sum");
  ASSERT_TRUE(kernel.ok());
  metal_sim::Launch launch;
  launch.threads_per_threadgroup = {64, 1, 1};
  launch.buffers[0] = {in.data(), int64_t{64 * sizeof(float)}, true};
  launch.buffers[1] = {out.data(), int64_t{sizeof(float)}};
  launch.program_ranges = (*program)->ranges();
  auto report = metal_sim::Simulate(**kernel, launch, {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  for (const metal_sim::Finding& finding : report->findings) {
    std::cout << (*program)->Locate({finding.site})[0] << ": " << finding.text << "\n";
  }
  EXPECT_TRUE(report->findings.empty());
  EXPECT_EQ(out[0], 64 * 65 / 2);
}

}  // namespace
}  // namespace metal_sim::readme_test
