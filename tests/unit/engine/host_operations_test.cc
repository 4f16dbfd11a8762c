// The operations that the host runs for a device in shared memory are counted, with the reason.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>

#include "backends/cpu/cpu_backend.h"
#include "ops/device/host_decoder.h"
#include "plan/step/decoder_calls.h"
#include "remote_backend.h"

namespace marlin::host_operations_test {
namespace {

TEST(HostOperations, AreCounted) {
  const Device device = testing::OpenRemote({.lacking = {DecoderOperation::kAddTo}});
  Result<std::unique_ptr<Backend>> host = cpu::OpenCpu({.threads = 1});
  ASSERT_TRUE(host.ok());
  const HostDecoder decoder(std::move(*host), Internals::Impl(device).backend());
  EXPECT_TRUE(decoder.HostOperations().empty());
  EXPECT_TRUE(decoder.Has(DecoderOperation::kAddTo));
  EXPECT_FALSE(decoder.RunsItself(DecoderOperation::kAddTo));
  EXPECT_TRUE(decoder.RunsItself(DecoderOperation::kRmsNorm));
  EXPECT_TRUE(decoder.RunsItself(DecoderOperation::kLookUpWeightRows));

  std::array<float, 3> y = {1, 2, 3};
  std::array<float, 3> x = {5, 5, 5};
  const AddToCall call{{y.data(), DType::kF32, {1, 3}}, {x.data(), DType::kF32, {1, 3}}, 1.0F};
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(decoder.Run(call, {}).ok());
  EXPECT_EQ(x[2], 11);
  const std::vector<HostOperation> ran = decoder.HostOperations();
  ASSERT_EQ(ran.size(), 1U);
  EXPECT_EQ(ran[0].name, "residual addition");
  EXPECT_EQ(ran[0].calls, 2);
  EXPECT_FALSE(ran[0].has_kernel);
}

TEST(HostOperations, AreNoneOnTheCpu) {
  EXPECT_TRUE(Device::Open("cpu", {.threads = 1})->info().host_operations.empty());
}

}  // namespace
}  // namespace marlin::host_operations_test
