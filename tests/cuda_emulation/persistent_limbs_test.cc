// Products of 4-bit integers and limbs of activations, a tile at a time, against double: far nearer
// than bf16 is, so that all limbs count.
#include <gtest/gtest.h>

#if __CUDA_ARCH__ >= 900
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backends/cuda/persistent/persistent_limbs.cuh"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda {
namespace {

constexpr int kTileBytes = 4096;  ///< More than a tile has.
constexpr int kMostRows = kMostLimbRows;

struct OneTile {
  PersistentArguments args;
  TileView weights;
  const float4* activations;  ///< [rows][kTileK]
  float* out;                 ///< [rows][kStripOutputs]
};

/// A warp stores its activations, and multiplies them by the tile.
template <PersistentForm kForm, int kGroups, bool kSeconds>
void MultiplyTile(OneTile of) {
  const auto lane = static_cast<int>(threadIdx.x);
  uint8_t* const tile = Memory() + of.args.shared.ring;
  for (int i = lane * 16; i < of.weights.tile_bytes; i += 32 * 16) {
    std::memcpy(tile + i, of.weights.tiles + i, 16);
  }
  for (int row = 0; row < of.args.rows; ++row) {
    StoreLimbs(of.args, lane, of.activations[row * 32 + lane], row);
  }
  __syncwarp();
  LimbProducts<kForm, kGroups, kSeconds> products(of.args, of.weights, 0);
  products.Clear();
  int released = 0;
  products.Add(SharedAddress(tile), 0, of.weights, [&] { ++released; });
  EXPECT_EQ(released, 1);
  products.Store(0);
  __syncwarp();
  for (int row = 0; row < of.args.rows; ++row) {
    of.out[row * kStripOutputs + lane] = WarpSumsOf<kForm>(of.args, 0, row)[lane];
  }
}

template <PersistentForm kForm>
void (*KernelFor(int groups, bool seconds))(OneTile) {
  if (groups == 1) return seconds ? &MultiplyTile<kForm, 1, true> : &MultiplyTile<kForm, 1, false>;
  if (groups == 2) return seconds ? &MultiplyTile<kForm, 2, true> : &MultiplyTile<kForm, 2, false>;
  return seconds ? &MultiplyTile<kForm, 0, true> : &MultiplyTile<kForm, 0, false>;
}

std::vector<float> Multiply(const TiledWeights& weights, const std::vector<float4>& activations) {
  OneTile of;
  of.args.rows = static_cast<int>(activations.size()) / 32;
  of.args.limb_stride = kTileK + 16;
  of.args.activation_stride = kLimbCount * of.args.limb_stride;
  of.args.shared.activations = 128;
  of.args.shared.limb_units = of.args.shared.activations + kMostRows * of.args.activation_stride;
  of.args.shared.sums = of.args.shared.limb_units + 128;
  of.args.shared.ring = of.args.shared.sums + 16 * 1024;
  of.weights = weights.view();
  of.activations = activations.data();
  std::vector<float> out(static_cast<size_t>(of.args.rows * kStripOutputs));
  of.out = out.data();
  const int groups = of.weights.groups_per_tile;
  const bool seconds = of.weights.zero_kind != ZeroKind::kNone;
  auto* const kernel = of.args.rows == 1 ? KernelFor<PersistentForm::kToken>(groups, seconds)
                                         : KernelFor<PersistentForm::kRows>(groups, seconds);
  EXPECT_EQ(
      cuda_emulation::Emulate(kernel, {dim3(1), dim3(32), of.args.shared.ring + kTileBytes}, of),
      "");
  for (float& sum : out) sum *= weights.Multiplier(true);
  return out;
}

std::vector<float4> Random(int rows, float scale) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float4> made(static_cast<size_t>(rows) * 32);
  for (float4& quad : made) {
    quad = {normal(random) * scale, normal(random) * scale, normal(random) * scale,
            normal(random) * scale};
  }
  return made;
}

/// Compares a row's sums: limbs have 22 bits, and scaled sums are in fp32.
void ExpectNear(const TiledWeights& weights, const float4* activations, const float* found) {
  const auto* const x = reinterpret_cast<const float*>(activations);
  double largest = 0;
  for (int k = 0; k < kTileK; ++k) largest = std::max(largest, std::abs(double{x[k]}));
  for (int n = 0; n < kStripOutputs; ++n) {
    double wanted = 0;
    double size = 0;
    for (int k = 0; k < kTileK; ++k) {
      wanted += x[k] * weights.At(k, n);
      size += std::abs(weights.At(k, n));
    }
    EXPECT_NEAR(found[n], wanted, 1e-6 * largest * size) << n;
  }
}

TEST(PersistentLimbs, AreNearToFp32WithAnyGroups) {
  uint32_t seed = 1;
  for (const int group_size : {16, 32, 64, 128}) {
    for (const ZeroKind zeros : {ZeroKind::kNone, ZeroKind::kZeros, ZeroKind::kBiases}) {
      const TiledWeights weights({CodeKind::kInt4, kTileK, kStripOutputs, group_size, zeros},
                                 ++seed);
      for (const int rows : {1, 2}) {
        SCOPED_TRACE(testing::Message()
                     << group_size << " " << static_cast<int>(zeros) << " " << rows);
        const std::vector<float4> x = Random(rows, 3.0f);
        const std::vector<float> found = Multiply(weights, x);
        for (int row = 0; row < rows; ++row) {
          ExpectNear(weights, x.data() + row * 32, found.data() + row * kStripOutputs);
        }
      }
    }
  }
}

TEST(PersistentLimbs, HaveTheRangeOfActivations) {
  const TiledWeights weights({CodeKind::kInt4, kTileK, kStripOutputs, 128, ZeroKind::kNone}, 9);
  for (const float scale : {1e-44f, 1e-36f, 1e-30f, 0.0f, 1.0f, 65504.0f, 1e18f}) {
    SCOPED_TRACE(scale);
    std::vector<float4> x = Random(2, scale);
    // The largest number below a power of two, and its negative.
    x[7].y = std::nextafter(8.0f, 0.0f) * scale;
    x[32].x = -x[7].y;
    const std::vector<float> found = Multiply(weights, x);
    for (int row = 0; row < 2; ++row) {
      for (int n = 0; n < kStripOutputs; ++n) {
        ASSERT_TRUE(std::isfinite(found[static_cast<size_t>(row * kStripOutputs + n)]));
      }
      if (scale >= 1e-30f || scale == 0.0f) {
        ExpectNear(weights, x.data() + row * 32, found.data() + row * kStripOutputs);
      }
    }
  }
}

TEST(PersistentLimbs, ErrorsStayInTheirRow) {
  const TiledWeights weights({CodeKind::kInt4, kTileK, kStripOutputs, 64, ZeroKind::kZeros}, 10);
  for (const float error :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::quiet_NaN()}) {
    for (const int row : {0, 1}) {
      std::vector<float4> x = Random(2, 1.0f);
      x[static_cast<size_t>(row * 32 + 13)].z = error;
      const std::vector<float> found = Multiply(weights, x);
      for (int n = 0; n < kStripOutputs; ++n) {
        EXPECT_TRUE(std::isnan(found[static_cast<size_t>(row * kStripOutputs + n)]));
      }
      ExpectNear(weights, x.data() + (1 - row) * 32, found.data() + (1 - row) * kStripOutputs);
    }
  }
}

}  // namespace
}  // namespace marlin::cuda
#else
TEST(PersistentLimbs, NeedCopiesInBulk) { GTEST_SKIP() << "the kernel is for 9.0a alone"; }
#endif
