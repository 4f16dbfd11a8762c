// Keys and values of heads from latents, on mma.sync.
#include "backends/cuda/attention/latent/expand_latents.cu"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/scalars.h"
#include "cuda_emulation/emulate.h"

namespace marlin::cuda::expand_latents_emulation_test {
namespace {

constexpr int kPageTokens = 2 * kCachePageTokens;

struct Numbers {
  std::vector<uint16_t> bits;
  double At(int64_t i) const { return Bf16ToFloat(bits[static_cast<size_t>(i)]); }
};

Numbers Draw(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Numbers numbers;
  for (int64_t i = 0; i < count; ++i) numbers.bits.push_back(FloatToBf16(normal(random)));
  return numbers;
}

RowsView View(std::vector<uint16_t>& of, int outer, int inner, int width) {
  RowsView rows;
  rows.data = of.data();
  rows.type = Element::kBf16;
  rows.rows = int64_t{outer} * inner;
  rows.inner = inner;
  rows.stride = int64_t{inner} * width;
  rows.inner_stride = width;
  return rows;
}

void Expect(const std::vector<uint16_t>& out, int64_t at, double expected) {
  const float actual = Bf16ToFloat(out[static_cast<size_t>(at)]);
  ASSERT_NEAR(actual, expected, 0.01 + std::abs(expected) / 200) << at;
}

/// The weights of a head.
struct HeadWeights {
  const Numbers& numbers;
  int64_t first;
  int64_t input_stride;
  int64_t output_stride;
  int inputs;
  int outputs;
};

/// Expects the products of the latent at `latent` with every fifth output of a head.
void ExpectProducts(const Numbers& latents, int64_t latent, const HeadWeights& weights,
                    const std::vector<uint16_t>& out, int64_t at) {
  for (int j = 0; j < weights.outputs; j += 5) {
    double sum = 0;
    for (int i = 0; i < weights.inputs; ++i) {
      const int64_t place = weights.first + i * weights.input_stride + j * weights.output_stride;
      sum += latents.At(latent + i) * weights.numbers.At(place);
    }
    Expect(out, at + j, sum);
  }
}

void Compare(int rank, int rope, int nope, int value_dim, bool fp8) {
  constexpr int kHeads = 2;
  const int width = rank + rope;
  Numbers latents = Draw(3 * kPageTokens * width, 1);
  std::vector<uint8_t> codes;
  for (uint16_t& bits : latents.bits) {
    codes.push_back(FloatToFp8E4M3(Bf16ToFloat(bits)));
    if (fp8) bits = FloatToBf16(Fp8E4M3ToFloat(codes.back()));
  }
  Numbers keys = Draw(int64_t{kHeads} * rank * nope, 2);
  Numbers values = Draw(int64_t{kHeads} * value_dim * rank, 3);
  const std::vector<int32_t> pages = {2, 0};
  const std::vector<int32_t> tokens = {kPageTokens, 70};
  const int key_dim = nope + rope;
  const int64_t stride = int64_t{kHeads} * kPageTokens * (key_dim + value_dim);
  std::vector<uint16_t> out(static_cast<size_t>(2 * stride), 0x7fc0);
  ValueRecord record;
  int any = 0;
  ExpandLatentsArguments args;
  args.latents.slabs[0] = fp8 ? static_cast<void*>(codes.data()) : latents.bits.data();
  args.latents.slab_count = 1;
  args.latents.slab_pages = 3;
  args.latents.page_stride = int64_t{kPageTokens} * width;
  args.latents.type = fp8 ? Element::kE4M3 : Element::kBf16;
  args.latents.page_tokens = kPageTokens;
  args.latents.key_dim = width;
  args.latents.value_dim = rank;
  args.latents.values_in_keys = true;
  args.sequences.block_tables = pages.data();
  args.sequences.count = 1;
  args.sequences.blocks = 2;
  args.tokens = tokens.data();
  args.key_weights = View(keys.bits, kHeads, rank, nope);
  args.value_weights = View(values.bits, kHeads, value_dim, rank);
  args.nope = nope;
  args.heads = kHeads;
  args.key_dim = key_dim;
  args.value_dim = value_dim;
  args.out_type = Element::kBf16;
  args.out = reinterpret_cast<uint8_t*>(out.data());
  args.page_stride = stride;
  args.errors = {&record, &any};
  ASSERT_EQ(LaunchMatrixExpandLatents(args, nullptr), cudaSuccess);
  ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  for (int page = 0; page < 2; ++page) {
    for (int token = 0; token < tokens[static_cast<size_t>(page)]; token += 3) {
      const int64_t latent =
          (int64_t{pages[static_cast<size_t>(page)]} * kPageTokens + token) * width;
      for (int head = 0; head < kHeads; ++head) {
        const int64_t place = int64_t{head} * kPageTokens + token;
        const int64_t key = page * stride + place * key_dim;
        ExpectProducts(latents, latent, {keys, int64_t{head} * rank * nope, nope, 1, rank, nope},
                       out, key);
        for (int j = 0; j < rope; ++j) {
          Expect(out, key + nope + j, latents.At(latent + rank + j));
        }
        const int64_t value =
            page * stride + int64_t{kHeads} * kPageTokens * key_dim + place * value_dim;
        ExpectProducts(latents, latent,
                       {values, int64_t{head} * value_dim * rank, 1, rank, rank, value_dim}, out,
                       value);
      }
    }
  }
}

TEST(ExpandLatents, KeysAndValues) {
  for (const bool fp8 : {false, true}) {
    Compare(128, 16, 128, 128, fp8);
    Compare(192, 64, 64, 128, fp8);
  }
}

}  // namespace
}  // namespace marlin::cuda::expand_latents_emulation_test
