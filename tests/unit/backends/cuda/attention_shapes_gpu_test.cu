// The attention kernels of every card on this one: those for less shared memory and without wgmma
// against exact attention, which ops.paged_attention compares with the CPU's.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "attention_problem.h"
#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/attention_plan.h"
#include "cards.h"
#include "gpu_fixture.h"

namespace marlin::cuda::attention_shapes_gpu_test {
namespace {

enum class Kernels : uint8_t { kExact, kDecode, kMma, kLatent };

class AttentionShapesOnGpu : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    for (const auto load :
         {LoadAttention, LoadDecodeAttention, LoadMmaAttention, LoadLatentAttention}) {
      ASSERT_EQ(load(), cudaSuccess);
    }
    ASSERT_EQ(
        cudaDeviceGetAttribute(&own_.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
        cudaSuccess);
  }

  /// A problem's arrays in device memory.
  void Load(const AttentionProblem& problem) {
    cache_ = Upload(problem.CacheBytes());
    queries_ = Upload(problem.QueryBytes());
    positions_ = Upload(problem.positions);
    first_rows_ = Upload(problem.first_rows);
    tables_ = Upload(problem.tables);
    sinks_ = Upload(problem.sinks);
    out_ = Make(problem.OutElements() * int64_t{sizeof(float)});
    record_ = Upload(std::vector<ValueRecord>(1));
    any_ = Upload(std::vector<int>(1));
    args_ = problem.Arguments({cache_.data(), queries_.data(), positions_.data(),
                               first_rows_.data(), tables_.data(), sinks_.data(), out_.data()});
    args_.errors = {static_cast<ValueRecord*>(record_.data()), static_cast<int*>(any_.data())};
    shape_ = problem.Shape();
  }

  AttentionPlan PlanOf(Kernels kernels, const DeviceShape& device) const {
    if (kernels == Kernels::kExact) return PlanAttention(shape_, device);
    if (kernels == Kernels::kLatent) return PlanLatentAttention(shape_, device);
    AttentionShape shape = shape_;
    if (kernels == Kernels::kMma) {
      // As if there were enough tokens to occupy the device.
      shape.rows = std::max<int64_t>(shape.rows, 1 << 20);
    }
    AttentionPlan plan = PlanMatrixAttention(shape, device);
    if (kernels == Kernels::kMma) {
      EXPECT_EQ(plan.segments, 0);
      plan.tiles = shape_.rows * shape_.group / plan.tile_rows + shape_.sequences;
    }
    return plan;
  }

  /// The results of kernels as a device takes them.
  std::vector<float> Run(Kernels kernels, const DeviceShape& device) {
    const AttentionPlan plan = PlanOf(kernels, device);
    AttentionArguments args = args_;
    args.tile_rows = plan.tile_rows;
    args.tiles = static_cast<int>(plan.tiles);
    args.segments = static_cast<int>(plan.segments);
    const DeviceBuffer partials = Make(std::max<int64_t>(plan.partial_bytes, 1));
    args.partials = static_cast<float*>(partials.data());
    EXPECT_EQ(cudaMemset(out_.data(), 0xff, static_cast<size_t>(out_.bytes())), cudaSuccess);
    const auto launch = kernels == Kernels::kExact    ? LaunchAttention
                        : kernels == Kernels::kDecode ? LaunchDecodeAttention
                        : kernels == Kernels::kMma    ? LaunchMmaAttention
                                                      : LaunchLatentAttention;
    EXPECT_EQ(launch(args, device, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(Download<ValueRecord>(record_)[0].value_error, 0);
    return Download<float>(out_);
  }

  void ExpectNear(const std::vector<float>& actual, const std::vector<float>& expected,
                  bool one_term) const {
    ASSERT_EQ(actual.size(), expected.size());
    // Two terms of bf16 leave 2^-16 of a score, one leaves 2^-9.
    const float bound = one_term ? 0.03F : 5e-4F;
    for (size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], bound) << i;
  }

  /// Compares kernels with the exact ones, and with themselves.
  void Compare(Kernels kernels, const AttentionCase& of, const std::vector<Feed>& feeds) {
    Load(AttentionProblem(of, feeds));
    const std::vector<float> expected = Run(Kernels::kExact, own_);
    for (const Card& card : Cards()) {
      if (card.shape.shared_bytes > own_.shared_bytes) continue;
      SCOPED_TRACE(std::string(card.name) + " " + of.Name());
      DeviceShape device = card.shape;
      device.has_wgmma = false;
      const std::vector<float> actual = Run(kernels, device);
      ExpectNear(actual, expected, of.one_term);
      EXPECT_EQ(Run(kernels, device), actual) << "not deterministic";
      if (HasFatalFailure()) return;
    }
  }

  DeviceShape own_;

 private:
  AttentionArguments args_;
  AttentionShape shape_;
  DeviceBuffer cache_, queries_, positions_, first_rows_, tables_, sinks_, out_, record_, any_;
};

const std::vector<Feed> kPrompts = {{150, 0}, {1, 40}, {70, 190}, {0, 0}, {3, 5}};

TEST_F(AttentionShapesOnGpu, PrefillOnMma) {
  for (const auto& [key_dim, value_dim] : {std::pair{64, 64},
                                           {128, 128},
                                           {192, 128},
                                           {256, 256},
                                           {80, 48},
                                           {256, 64},
                                           {96, 112},
                                           {16, 240}}) {
    for (const bool fp8 : {false, true}) {
      for (const bool bf16_queries : {false, true}) {
        Compare(Kernels::kMma, {key_dim, value_dim, fp8, bf16_queries}, kPrompts);
      }
    }
    Compare(Kernels::kMma, {key_dim, value_dim, false, false, 5.0F, 60}, kPrompts);
    Compare(Kernels::kMma, {key_dim, value_dim, true, true, 0, 50, true, true}, kPrompts);
    AttentionCase one_term = {key_dim, value_dim, false, false, 0, 60};
    one_term.one_term = true;
    Compare(Kernels::kMma, one_term, kPrompts);
  }
}

TEST_F(AttentionShapesOnGpu, PrefillOnMmaKeepsNanInItsRows) {
  for (const bool fp8 : {false, true}) {
    AttentionProblem problem({128, 128, fp8}, {{150, 0}});
    Load(problem);
    const DeviceShape small = Cards()[2].shape;
    const std::vector<float> clean = Run(Kernels::kMma, small);
    problem.cache[static_cast<size_t>(problem.At(0, 0, 70, true) + 17)] = fp8 ? 0x7f : 0x7fc0;
    Load(problem);
    const std::vector<float> poisoned = Run(Kernels::kMma, small);
    for (size_t i = 0; i < clean.size(); ++i) {
      const auto feature = static_cast<int>(i % 128);
      const auto head = static_cast<int>(i / 128 % 6);
      const auto token = static_cast<int>(i / 128 / 6);
      if (token >= 70 && head < 3 && feature == 17) {
        ASSERT_TRUE(std::isnan(poisoned[i])) << token << " " << head;
      } else {
        ASSERT_NEAR(poisoned[i], clean[i], 1e-5) << token << " " << head << " " << feature;
      }
    }
  }
}

TEST_F(AttentionShapesOnGpu, Decode) {
  const std::vector<Feed> tokens = {{1, 0}, {1, 700}, {1, 40}, {1, 129}};
  for (const auto& [key_dim, value_dim] :
       {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}, {256, 128}, {512, 512}, {512, 64}}) {
    for (const bool fp8 : {false, true}) {
      Compare(Kernels::kDecode, {key_dim, value_dim, fp8}, tokens);
      Compare(Kernels::kDecode, {key_dim, value_dim, fp8, true, 5.0F, 100, false, true}, tokens);
    }
  }
}

TEST_F(AttentionShapesOnGpu, Latents) {
  for (const bool fp8 : {false, true}) {
    for (const int group : {16, 5}) {
      AttentionCase of = {576, 512, fp8};
      of.latent = true;
      of.kv_heads = 1;
      of.group = group;
      Compare(Kernels::kLatent, of, {{1, 300}, {40, 10}, {1, 0}});
      of.key_dim = 96;
      of.value_dim = 64;
      Compare(Kernels::kLatent, of, {{1, 300}, {40, 10}, {1, 0}});
      of.latent = false;
      of.key_dim = 512;
      of.value_dim = 400;
      of.window = 50;
      Compare(Kernels::kLatent, of, {{1, 300}, {40, 10}, {1, 0}});
    }
  }
}

// The bits do not depend on the tile, and so not on the card.
TEST_F(AttentionShapesOnGpu, ExactAttentionHasTheSameBits) {
  for (const int key_dim : {128, 512, 576, 1024}) {
    Load(AttentionProblem({key_dim, 128, false, false, 0, 0, false, true}, kPrompts));
    const std::vector<float> expected = Run(Kernels::kExact, own_);
    for (const Card& card : Cards()) {
      if (card.shape.shared_bytes > own_.shared_bytes) continue;
      EXPECT_EQ(Run(Kernels::kExact, card.shape), expected) << card.name << " " << key_dim;
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::attention_shapes_gpu_test
