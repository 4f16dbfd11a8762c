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

void ExpectRows(CodeKind kind, ZeroKind zeros, int group_size) {
  SCOPED_TRACE(std::to_string(static_cast<int>(kind)) + " g" + std::to_string(group_size));
  constexpr int kFeatures = 192;
  constexpr int kTokens = 40;
  const TiledWeights weights({kind, kFeatures, kTokens, group_size, zeros});
  const std::vector<int32_t> ids = {39, 0, 17, 17};
  std::vector<float> out(ids.size() * kFeatures, -1.0f);
  LookUpWeightsArguments args;
  args.ids.data = ids.data();
  args.out.data = out.data();
  args.out.rows = static_cast<int64_t>(ids.size());
  args.out.stride = kFeatures;
  args.columns = kFeatures;
  args.outputs = kTokens;
  const TileReader reader{weights.view(), kind};
  for (const uint32_t seed : {0u, 5u}) {
    EXPECT_EQ(cuda_emulation::Emulate(&LookUpWeightsKernel<TileReader>,
                                      {dim3(4, 2), kLookUpThreads, 0, seed}, reader, args),
              "");
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int k = 0; k < kFeatures; ++k) {
        ASSERT_EQ(double{out[i * kFeatures + static_cast<size_t>(k)]}, weights.At(k, ids[i]))
            << i << " " << k;
      }
    }
  }
}

TEST(LookUpWeights, TilesOfEveryKind) {
  for (const CodeKind kind : {CodeKind::kFp4, CodeKind::kInt4, CodeKind::kTable3, CodeKind::kTable2,
                              CodeKind::kE4M3, CodeKind::kInt8}) {
    ExpectRows(kind, ZeroKind::kNone, 64);
  }
  ExpectRows(CodeKind::kInt8, ZeroKind::kNone, 128);
  ExpectRows(CodeKind::kInt8, ZeroKind::kZeros, 32);
  ExpectRows(CodeKind::kInt4, ZeroKind::kBiases, 64);
  ExpectRows(CodeKind::kDense16, ZeroKind::kNone, 128);
}

}  // namespace
}  // namespace marlin::cuda
