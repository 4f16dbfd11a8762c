// Sums of the MMA kernel on the host, after the epilogue: the formula of the library on exact
// sums, in every form, and the same bits at every width.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/gemm/mma/mma_kernel.cuh"
#include "backends/cuda/gemm/mma/mma_plan.h"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda {
namespace {

struct EpilogueCase {
  int m = 20;
  int n = 128;
  int k = 512;
  int splits = 1;
  bool gated = false;
  int multiprocessors = 8;
  int extra_stride = 0;
};

constexpr int kRelu = 3;

class MmaSums {
 public:
  explicit MmaSums(const EpilogueCase& given)
      : given_(given),
        weights_({.kind = CodeKind::kFp4, .k = given.k, .n = given.n}),
        a_(given.m, given.k, true),
        columns_(given.gated ? given.n / 2 : given.n),
        stride_(columns_ + given.extra_stride) {
    for (int i = 0; i < given.m; ++i) row_weights_.push_back(i % 2 == 0 ? 0.5f : 2.0f);
    for (int j = 0; j < given.n; ++j) biases_.push_back(static_cast<float>(j % 5 - 2));
  }

  /// out and the number of bits of every output that were stored.
  template <int kTokens>
  std::vector<float> Run(Element type, bool decorated, uint32_t seed = 0) {
    TileProblem tiles = {
        .m = given_.m, .n = given_.n, .k = given_.k, .tile_bytes = weights_.view().tile_bytes};
    tiles.gated = given_.gated;
    DeviceShape device;
    device.code = kHasTma ? 120 : 80;
    device.has_wgmma = false;
    device.multiprocessors = given_.multiprocessors;
    device.shared_bytes = 99 * 1024;
    const MmaShape shape = {kTokens, given_.splits};
    EXPECT_TRUE(CanPlanMmaAs(tiles, device, shape));
    const MmaPlan plan = PlanMmaAs(tiles, device, shape);
    MmaArguments args = plan.arguments;
    args.weights = weights_.view();
    args.a = a_.memory.data();
    args.a_stride = a_.stride;
    const auto count = static_cast<size_t>(given_.m * stride_);
    constexpr float kUntouched = -12345;
    std::vector<float> floats(count, kUntouched);
    std::vector<uint16_t> numbers(count, FloatToBf16(kUntouched));
    const bool small = type == Element::kBf16;
    args.epilogue.out = small ? static_cast<void*>(numbers.data()) : floats.data();
    args.epilogue.type = type;
    args.epilogue.stride = stride_;
    args.epilogue.n = given_.n;
    args.epilogue.gated = given_.gated;
    args.epilogue.multiplier = weights_.Multiplier(true);
    args.epilogue.activation = decorated || given_.gated ? kRelu : 0;
    args.epilogue.bias = decorated ? biases_.data() : nullptr;
    args.epilogue.row_weight = decorated ? row_weights_.data() : nullptr;
    std::vector<uint32_t> workspace(static_cast<size_t>(MmaWorkspaceBytes(tiles, plan)) / 4, ~0u);
    auto* const sums = reinterpret_cast<float*>(workspace.data());
    if (plan.partials) {
      args.partials = sums;
    } else if (args.splits > 1) {
      args.tile_counters = workspace.data();
      args.parts = sums + MmaCounterBytes(plan) / 4;
    }
    void* parameters[] = {&args};
    using Kernel = void (*)(MmaArguments);
    const Kernel kernel = &MmaKernel<CodeKind::kFp4, Bf16x2, kTokens, ParameterUse::kOneScale>;
    const dim3 grid(static_cast<unsigned>(plan.items), static_cast<unsigned>(args.splits));
    const dim3 block(static_cast<unsigned>(plan.warps * 32));
    EXPECT_EQ(cuda_emulation::EmulateUntyped(cuda_emulation::Untyped(kernel),
                                             {grid, block, plan.shared_bytes, seed}, parameters),
              "");
    if (plan.partials) {
      LaunchReducePartials(sums, args.splits, given_.m, args.epilogue, true, nullptr);
      EXPECT_EQ(cuda_emulation::TakeFindings(), "");
    } else if (args.splits > 1) {
      for (int i = 0; i < plan.items; ++i) EXPECT_EQ(workspace[static_cast<size_t>(i)], ~0u);
    }
    std::vector<float> out;
    for (int i = 0; i < given_.m; ++i) {
      for (int j = 0; j < stride_; ++j) {
        const auto at = static_cast<size_t>(i * stride_ + j);
        const float value = small ? Bf16ToFloat(numbers[at]) : floats[at];
        if (j < columns_) {
          out.push_back(value);
        } else {
          EXPECT_EQ(value, small ? Bf16ToFloat(FloatToBf16(kUntouched)) : kUntouched);
        }
      }
    }
    return out;
  }

  std::vector<float> Expected(Element type, bool decorated) const {
    const std::vector<float> sums = ExactProduct(a_, weights_, given_.n);
    std::vector<float> out;
    for (int i = 0; i < given_.m; ++i) {
      const auto sum = [&](int j) {
        const float bias = decorated ? biases_[static_cast<size_t>(j)] : 0.0f;
        return sums[static_cast<size_t>(i * given_.n + j)] + bias;
      };
      for (int j = 0; j < columns_; ++j) {
        float value = sum(j);
        if (decorated || given_.gated) value = value < 0 ? 0 : value;
        if (given_.gated) value *= sum(j + columns_);
        if (decorated) value *= row_weights_[static_cast<size_t>(i)];
        if (type == Element::kBf16) value = Bf16ToFloat(FloatToBf16(value));
        out.push_back(value);
      }
    }
    return out;
  }

 private:
  const EpilogueCase given_;
  TiledWeights weights_;
  Activations a_;
  int columns_;
  int stride_;
  std::vector<float> row_weights_;
  std::vector<float> biases_;
};

template <int kTokens>
void ExpectExact(const EpilogueCase& given) {
  MmaSums sums(given);
  for (const Element type : {Element::kF32, Element::kBf16}) {
    for (const bool decorated : {false, true}) {
      EXPECT_EQ(sums.Run<kTokens>(type, decorated, decorated ? 3 : 0),
                sums.Expected(type, decorated));
    }
  }
}

TEST(MmaEpilogue, StoresEveryForm) {
  ExpectExact<16>({});
  ExpectExact<32>({.m = 40, .n = 97, .extra_stride = 3});
  ExpectExact<64>({.m = 33, .n = 300, .k = 100});
}

TEST(MmaEpilogue, StoresGatesWithTheirUps) {
  ExpectExact<16>({.n = 192, .gated = true});
  ExpectExact<64>({.m = 70, .n = 320, .k = 256, .gated = true, .extra_stride = 1});
}

TEST(MmaEpilogue, ReducesGatesThatLieApart) {
  ExpectExact<32>({.n = 140, .k = 1024, .splits = 2, .gated = true});
}

TEST(MmaEpilogue, AddsSplits) {
  ExpectExact<16>({.n = 160, .k = 2048, .splits = 4});
  ExpectExact<128>({.m = 20, .n = 64, .k = 1030, .splits = 2, .gated = true});
}

}  // namespace
}  // namespace marlin::cuda
