// The benchmark of placed experts, on two devices.
#include "bench/moe/moe_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace marlin::bench::moe_placement_test {
namespace {

MoeCase SmallCase() {
  MoeCase bench;
  bench.gemm.shape = {3, 32, 64};
  bench.gemm.spec.format = Format::kFp4E2M1;
  bench.gemm.spec.group_size = 32;
  bench.experts = 8;
  bench.top_k = 2;
  bench.layers = 2;
  return bench;
}

TEST(MoePlacement, CountsWhatBothSidesDo) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  const Device host = *Device::Open("cpu", {.threads = 1});
  const MoeCase bench = SmallCase();
  const auto result = RunPlacement(device, host, bench, 4);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_GT(result->host_share, 0.3);
  EXPECT_LT(result->host_share, 0.7);
  // A token has two selections; at most four experts are fetched, and as many as are selected.
  const double selections = 3 * 2 * result->host_share;
  EXPECT_GE(result->host_rows, selections / 2);
  EXPECT_LE(result->host_rows, std::min(3.0, selections));
  EXPECT_GT(result->fetched_bytes, 0);
  EXPECT_LE(result->fetched_bytes, std::min(4.0, selections) * bench.ExpertBytes());
  for (const Timing* timing : {&result->placed, &result->host, &result->fetch, &result->device}) {
    EXPECT_GT(timing->median, 0);
  }
  EXPECT_EQ(result->ToJson()["peers"].size(), 3U);
  EXPECT_NE(PlacementText({*result}).find("placed ms"), std::string::npos);
}

TEST(MoePlacement, FetchesNothingWithoutExpertsOnTheHost) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  const auto result = RunPlacement(device, device, SmallCase(), 0);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->host_share, 0);
  EXPECT_EQ(result->host_rows, 0);
  EXPECT_EQ(result->fetched_bytes, 0);
}

TEST(MoePlacement, RefusesMoreExpertsThanThereAre) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  const auto result = RunPlacement(device, device, SmallCase(), 9);
  EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(std::string(result.status().message()), "experts: expected 0..8, got -1");
}

}  // namespace
}  // namespace marlin::bench::moe_placement_test
