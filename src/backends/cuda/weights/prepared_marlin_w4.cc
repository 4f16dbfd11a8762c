// Uploads 4-bit codes in the public marlin_w4 layout (docs/formats/marlin_w4.md), with scales
// normalized to 16 bits as in tiles.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "backends/cuda/weights/prepared_tiles.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/parameters.h"
#include "marlin/layout.h"

namespace marlin::cuda {
namespace {

constexpr int64_t kStripOf = kStripOutputs;  // Outputs per block of the layout, as per tile.

/// Calls body(index in device memory, index in [groups, n]) for every parameter of a matrix.
template <typename Body>
void ForEachParameter(const WeightsSpec& spec, int64_t groups, const Body& body) {
  const int64_t padded = RoundUp(spec.n, kStripOf);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t n = 0; n < spec.n; ++n) {
      const int64_t place = n % 8 * 4 + n % kStripOf / 8;
      body(group * padded + n / kStripOf * kStripOf + place, group * spec.n + n);
    }
  }
}

/// Fills an expert's scales, normalized by 2^exponent, and after them its zeros or normalized
/// biases, if the tiles have any. Exact: CanTile holds, so 16 bits hold each of them.
void FillParameters(const QuantizedWeights& weights, const TileView& tiles, int64_t expert,
                    int exponent, std::span<uint16_t> numbers) {
  const WeightsSpec& spec = weights.spec;
  const int64_t groups = GroupCount(spec);
  const int64_t parameters = groups * RoundUp(spec.n, kStripOf);
  const int64_t first = expert * groups * spec.n;
  const auto normalized = [&](const TensorView& view, int64_t i) {
    const float value = std::ldexp(ParameterAt(view, first + i), exponent);
    return tiles.bf16_parameters ? FloatToBf16(value) : FloatToHalf(value);
  };
  ForEachParameter(spec, groups, [&](int64_t to, int64_t from) {
    numbers[static_cast<size_t>(to)] = normalized(weights.scales, from);
    if (tiles.zero_kind == ZeroKind::kNone) return;
    numbers[static_cast<size_t>(parameters + to)] =
        tiles.zero_kind == ZeroKind::kZeros ? FloatToHalf(ParameterAt(weights.zeros, first + from))
                                            : normalized(weights.biases, from);
  });
}

}  // namespace

Status CheckMarlinW4(const WeightsSpec& spec, bool can_tile) {
  const FormatInfo& info = GetFormatInfo(spec.format);
  if (!info.quantized || info.bits != 4) {
    return Status(Code::kUnsupported, "prepare: marlin_w4 holds codes of 4 bits, " +
                                          std::string(info.name) + " has " +
                                          std::to_string(info.bits));
  }
  if (can_tile) return Status();
  return Status(
      Code::kUnsupported,
      "prepare: the kernel on marlin_w4 takes scales of 16 bits or less, groups that are "
      "a multiple of 16 or all of k, zeros that fp16 holds, and biases of the scales' type; got " +
          std::string(ScaleTypeName(spec.scale_type)) + " and groups of " +
          std::to_string(spec.group_size));
}

Status PreparedTiles::UploadMarlinW4(const QuantizedWeights& weights,
                                     const std::shared_ptr<DeviceHandle>& device) {
  const int64_t groups = GroupCount(spec);
  const int64_t words = MarlinW4WordCount(spec.k, spec.n);
  const int64_t parameters = groups * RoundUp(spec.n, kStripOf);
  const int kinds = tiles_.zero_kind == ZeroKind::kNone ? 1 : 2;
  constexpr auto kWordBytes = int64_t{sizeof(uint32_t)};
  constexpr auto kParameterBytes = int64_t{sizeof(uint16_t)};
  const int64_t canonical_words = WordsAlongK(spec.format, spec.k) * spec.n;
  expert_bytes_ = words * kWordBytes + kinds * parameters * kParameterBytes;
  bytes = expert_bytes_ * spec.experts;
  MARLIN_ASSIGN_OR_RETURN(memory_, DeviceMemory::Allocate(device, bytes));
  std::vector<uint32_t> codes(static_cast<size_t>(words));
  std::vector<uint16_t> numbers(static_cast<size_t>(kinds * parameters));
  for (int64_t expert = 0; expert < spec.experts; ++expert) {
    MARLIN_RETURN_IF_ERROR(
        RepackToMarlinW4(spec.k, spec.n,
                         {weights.codes.As<uint32_t>() + expert * canonical_words,
                          static_cast<size_t>(canonical_words)},
                         codes));
    FillParameters(weights, tiles_, expert, exponents_[static_cast<size_t>(expert)], numbers);
    uint8_t* to = memory_.data() + expert * expert_bytes_;
    MARLIN_RETURN_IF_ERROR(device->errors.Check(
        cudaMemcpy(to, codes.data(), codes.size() * sizeof(uint32_t), cudaMemcpyHostToDevice),
        "cudaMemcpy of weights"));
    MARLIN_RETURN_IF_ERROR(
        device->errors.Check(cudaMemcpy(to + words * kWordBytes, numbers.data(),
                                        numbers.size() * sizeof(uint16_t), cudaMemcpyHostToDevice),
                             "cudaMemcpy of weights"));
  }
  // A copy from pageable memory may return before its DMA is done.
  return device->errors.Check(cudaStreamSynchronize(nullptr), "upload of weights");
}

MarlinW4View PreparedTiles::MarlinW4(int64_t expert) const {
  MarlinW4View view;
  view.codes = Tiles(expert);
  view.parameters =
      view.codes.tiles + MarlinW4WordCount(spec.k, spec.n) * int64_t{sizeof(uint32_t)};
  view.group_size = static_cast<int>(std::min(spec.group_size, std::max<int64_t>(spec.k, 1)));
  view.groups = static_cast<int>(GroupCount(spec));
  return view;
}

}  // namespace marlin::cuda
