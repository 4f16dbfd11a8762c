// Decodes every code of every format in every position of a fragment to MMA operands on a GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/weights/prepared_tiles.h"
#include "base/scalars.h"
#include "lane_codes.cuh"
#include "layout/plain_weights.h"
#include "marlin/format.h"

namespace marlin::cuda {
namespace {

/// The decoded codes of a lane's words in one thread: unscaled, and times their scale.
struct Decoded {
  uint32_t codes[kSteps][kPairs];
  uint32_t scaled[kSteps][kPairs];
};

template <CodeKind kKind, typename T>
__global__ void DecodeKernel(const uint32_t* words, TileView view, uint32_t scales, int count,
                             Decoded* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  uint32_t mine[CodeBits(kKind)];
  for (int w = 0; w < CodeBits(kKind); ++w) mine[w] = words[i * kMaxWords + w];
  const DecodeTable<kKind, T> table(view);
  const ParameterMode mode = ParameterModeOf<kKind, T>(view);
  GroupOperands operands = {};
  MakeOperands<kKind, T, ParameterUse::kAll>(scales, 0, mode, operands);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    FragmentDecoder<kKind, T>::Decode(mine, j, table, operands.offset, out[i].codes[j]);
    DecodeScaled<kKind, T, ParameterUse::kOneScale>(mine, j, table, mode, operands,
                                                    out[i].scaled[j]);
  }
}

struct DeviceFree {
  void operator()(void* data) const { (void)cudaFree(data); }
};
using DeviceBytes = std::unique_ptr<void, DeviceFree>;

/// A copy in device memory; null on failure.
template <typename E>
DeviceBytes Upload(std::span<const E> elements) {
  void* data = nullptr;
  if (cudaMalloc(&data, elements.size_bytes()) != cudaSuccess) return nullptr;
  DeviceBytes owner(data);
  const cudaError_t error =
      cudaMemcpy(data, elements.data(), elements.size_bytes(), cudaMemcpyHostToDevice);
  return error == cudaSuccess ? std::move(owner) : nullptr;
}

class DecodeFragment : public ::testing::TestWithParam<Format> {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(error);
    }
  }
};

uint16_t BitsOf(float value, bool bf16) { return bf16 ? FloatToBf16(value) : FloatToHalf(value); }
float FloatOf(uint32_t bits, bool bf16) {
  const auto half = static_cast<uint16_t>(bits);
  return bf16 ? Bf16ToFloat(half) : HalfToFloat(half);
}

/// The byte planes of TileView::table, with the exponent that scales the values to at most 1.
struct Planes {
  std::array<uint32_t, 16> words{};
  int exponent = 0;
};
Planes PlanesOf(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  Planes planes;
  while (std::ldexp(1.0f, planes.exponent) < largest) ++planes.exponent;
  auto* bytes = reinterpret_cast<uint8_t*>(planes.words.data());
  for (const bool bf16 : {true, false}) {
    for (size_t i = 0; i < std::min<size_t>(values.size(), 16); ++i) {
      const uint16_t bits = BitsOf(std::ldexp(values[i], -planes.exponent), bf16);
      bytes[(bf16 ? 0 : 32) + i] = static_cast<uint8_t>(bits & 255u);
      bytes[(bf16 ? 16 : 48) + i] = static_cast<uint8_t>(bits >> 8);
    }
  }
  return planes;
}

/// The scales of rows g and g + 8: powers of two in the normalized range.
constexpr float kScales[2] = {0x1p15f, 0x1p13f};

template <CodeKind kKind, typename T>
void CheckFormat(Format format) {
  const std::span<const float> values = FormatValues(format);
  std::vector<LaneCodes> lanes;
  std::vector<uint32_t> words;
  for (int first = 0; first < CountOf(kKind); ++first) {
    lanes.push_back(Ascending(kKind, first));
    const LaneWords encoded = Encode<kKind>(lanes.back());
    words.insert(words.end(), encoded.begin(), encoded.end());
  }
  const Planes planes = PlanesOf(values);
  const DeviceBytes device_words = Upload<uint32_t>(words);
  const DeviceBytes table = Upload<uint32_t>(planes.words);
  std::vector<Decoded> decoded(lanes.size());
  const DeviceBytes out = Upload<Decoded>(decoded);
  ASSERT_TRUE(device_words && table && out);

  TileView view;
  view.table = static_cast<const uint32_t*>(table.get());
  view.table_exponent = planes.exponent;
  if (kKind == CodeKind::kInt4) view.offset = -static_cast<int>(values[0]);
  if (kKind == CodeKind::kInt8) view.offset = format == Format::kS8 ? 128 : 0;
  const uint32_t scales = FloatToHalf(kScales[0]) | static_cast<uint32_t>(FloatToHalf(kScales[1]))
                                                        << 16;
  const auto count = static_cast<int>(lanes.size());
  DecodeKernel<kKind, T>
      <<<(count + 63) / 64, 64>>>(static_cast<const uint32_t*>(device_words.get()), view, scales,
                                  count, static_cast<Decoded*>(out.get()));
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(decoded.data(), out.get(), decoded.size() * sizeof(Decoded),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);

  constexpr CodeExponents kExponents = ExponentsOf(kKind, T::kIsBf16);
  const bool is_table = DecodeTable<kKind, T>::kEntries > 0;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    for (int i = 0; i < kCodes; ++i) {
      const uint32_t code = lanes[lane][static_cast<size_t>(i)];
      if (!std::isfinite(values[code])) continue;  // Refused before weights are prepared.
      const int step = i / 8;
      const int pair = i % 8 / 2;
      const float scale = kScales[pair & 1];
      // Table values are rounded to the operand's type; other values are exact in it.
      const float value =
          is_table
              ? FloatOf(BitsOf(std::ldexp(values[code], -planes.exponent), T::kIsBf16), T::kIsBf16)
              : values[code];
      const uint32_t plain = decoded[lane].codes[step][pair] >> (16 * (i % 2));
      const uint32_t scaled = decoded[lane].scaled[step][pair] >> (16 * (i % 2));
      ASSERT_EQ(FloatOf(plain & 0xffffu, T::kIsBf16), std::ldexp(value, kExponents.decode))
          << FormatName(format) << ", code " << code << " at " << i;
      ASSERT_EQ(FloatOf(scaled & 0xffffu, T::kIsBf16), std::ldexp(value * scale, -kExponents.shift))
          << FormatName(format) << ", code " << code << " at " << i;
    }
  }
}

template <typename T>
void CheckFormat(Format format) {
  VisitKind(KindOf(format), [&](auto kind) {
    if constexpr (kind != CodeKind::kDense16) CheckFormat<kind, T>(format);
  });
}

TEST_P(DecodeFragment, GivesTheCodecsValuesInBf16) { CheckFormat<Bf16x2>(GetParam()); }
TEST_P(DecodeFragment, GivesTheCodecsValuesInFp16) { CheckFormat<F16x2>(GetParam()); }

/// Codes of 5 and 6 bits are widened before a kernel reads them.
std::vector<Format> CodedFormats() {
  std::vector<Format> formats;
  for (const FormatInfo& info : AllFormats()) {
    const bool read = WiderFormat(info.format) == info.format;
    if (info.quantized && read) formats.push_back(info.format);
  }
  return formats;
}

INSTANTIATE_TEST_SUITE_P(Formats, DecodeFragment, ::testing::ValuesIn(CodedFormats()),
                         [](const auto& format) { return std::string(FormatName(format.param)); });

}  // namespace
}  // namespace marlin::cuda
