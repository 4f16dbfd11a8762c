// Lookups in prepared weights on the host: rows of an embedding, of all kinds of tiles.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "backends/cuda/rows/look_up_weights.cuh"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda {
namespace {

template <CodeKind kKind>
void ExpectRows(ZeroKind zeros, int group_size, int features = 192) {
  SCOPED_TRACE(std::to_string(static_cast<int>(kKind)) + " g" + std::to_string(group_size));
  constexpr int kTokens = 40;
  const TiledWeights weights({kKind, features, kTokens, group_size, zeros});
  const std::vector<int32_t> ids = {39, 0, 17, 17, 8};
  const auto stride = static_cast<size_t>(features) + 1;
  for (const uint32_t seed : {0u, 5u}) {
    std::vector<float> out(ids.size() * stride, -1.0f);
    LookUpWeightsArguments args;
    args.ids.data = ids.data();
    args.out.data = out.data();
    args.out.rows = static_cast<int64_t>(ids.size());
    args.out.stride = features + 1;
    args.columns = features;
    args.outputs = kTokens;
    // Rows of an odd number of elements are not stored in pairs.
    args.pairs = seed != 0;
    if (args.pairs) args.out.stride = features;
    EXPECT_EQ(cuda_emulation::Emulate(&LookUpTilesKernel<kKind>,
                                      {dim3(5, 1), kLookUpThreads, 0, seed}, weights.view(), args),
              "");
    for (size_t i = 0; i < ids.size(); ++i) {
      const float* const row = out.data() + i * static_cast<size_t>(args.out.stride);
      for (int k = 0; k < features; ++k) {
        ASSERT_EQ(double{row[k]}, weights.At(k, ids[i])) << i << " " << k;
      }
    }
    EXPECT_EQ(out.back(), -1.0f);
  }
}

TEST(LookUpWeights, TilesOfEveryKind) {
  using enum CodeKind;
  ExpectRows<kFp4>(ZeroKind::kNone, 64);
  ExpectRows<kInt4>(ZeroKind::kNone, 64);
  ExpectRows<kTable4>(ZeroKind::kNone, 64);
  ExpectRows<kTable3>(ZeroKind::kNone, 64);
  ExpectRows<kTable2>(ZeroKind::kNone, 64);
  ExpectRows<kInt8>(ZeroKind::kNone, 64);
  ExpectRows<kInt8>(ZeroKind::kNone, 128, 768);
  ExpectRows<kInt8>(ZeroKind::kZeros, 32);
  ExpectRows<kInt4>(ZeroKind::kBiases, 16, 80);
  ExpectRows<kDense16>(ZeroKind::kNone, 128);
}

TEST(LookUpWeights, RecordsIdsOfNoToken) {
  const TiledWeights weights({CodeKind::kInt8, 128, 40, 64});
  const std::vector<int32_t> ids = {3, 40};
  std::vector<float> out(256, -1.0f);
  ValueRecord record;
  int any = 0;
  LookUpWeightsArguments args;
  args.ids.data = ids.data();
  args.out.data = out.data();
  args.out.rows = 2;
  args.out.stride = args.columns = 128;
  args.outputs = 40;
  args.pairs = true;
  args.errors = {&record, &any};
  EXPECT_EQ(cuda_emulation::Emulate(&LookUpTilesKernel<CodeKind::kInt8>,
                                    {dim3(2, 1), kLookUpThreads, 0}, weights.view(), args),
            "");
  EXPECT_EQ(static_cast<ValueError>(record.value_error), ValueError::kIds);
  EXPECT_EQ(record.numbers[0], 40);
  EXPECT_EQ(double{out[5]}, weights.At(5, 3));
  EXPECT_EQ(out[128], -1.0f);
}

}  // namespace
}  // namespace marlin::cuda
