#include "backends/cuda/weights/prepared_tiles.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/layout/sparse_layout.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/weights_launch.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/sparse_24.h"
#include "layout/weights_shapes.h"
#include "marlin/layout.h"

namespace marlin::cuda {
namespace {

/// Limits of a grid's y dimension: tiles along k of LaunchPackTiles, and columns / 256.
constexpr int64_t kMaxK = int64_t{65535} * kTileK;
constexpr int64_t kMaxN = int64_t{65535} * 256;
constexpr int kSmallestGroup = 16;  ///< k of one MMA.
constexpr size_t kMaxValues = 256;
constexpr int64_t kTableWords = 16;  ///< Byte planes of 16 values in bf16 and in fp16.

Element ElementOf(DType type) {
  switch (type) {
    case DType::kBf16:
      return Element::kBf16;
    case DType::kF16:
      return Element::kF16;
    case DType::kF8E8M0:
      return Element::kE8M0;
    case DType::kF8E4M3:
      return Element::kE4M3;
    default:
      return Element::kF32;
  }
}

/// Smallest and largest nonzero magnitude.
struct Range {
  float smallest = std::numeric_limits<float>::infinity();
  float largest = 0;
  void Add(float value) {
    const float magnitude = std::abs(value);
    if (magnitude == 0) return;
    smallest = std::min(smallest, magnitude);
    largest = std::max(largest, magnitude);
  }
};

Range RangeOf(const TensorView& view, int64_t experts, int64_t expert) {
  Range range;
  if (view.empty()) return range;
  const int64_t count = view.ElementCount() / experts;
  for (int64_t i = 0; i < count; ++i) range.Add(LoadScale(view, expert * count + i));
  return range;
}

std::span<const float> ValuesOf(const QuantizedWeights& weights) {
  if (!weights.codebook.empty()) return weights.codebook;
  return FormatValues(weights.spec.format);
}

Range RangeOfValues(std::span<const float> values) {
  Range range;
  for (const float value : values) range.Add(value);
  return range;
}

/// The largest e with 2^e <= magnitude.
int ExponentOf(float magnitude) { return magnitude == 0 ? 0 : std::ilogb(magnitude); }

/// The exponent of the power of two that scales an expert's largest parameter to [2^15, 2^16), or
/// as near as that power and its inverse are normal numbers.
int NormalizingExponent(float largest) {
  if (largest == 0) return 0;
  return std::clamp(15 - ExponentOf(largest), -100, 120);
}

/// Whether a 16-bit type holds all fp32 numbers times 2^exponent exactly.
bool FitIn(const TensorView& view, int64_t experts, int64_t expert, int exponent, bool bf16) {
  if (view.empty()) return true;
  const int64_t count = view.ElementCount() / experts;
  for (int64_t i = expert * count; i < (expert + 1) * count; ++i) {
    const float value = view.As<float>()[i];
    const float normal = std::ldexp(value, exponent);
    const float stored = bf16 ? Bf16ToFloat(FloatToBf16(normal)) : HalfToFloat(FloatToHalf(normal));
    // Compared after scaling back, because scaling may have rounded too; a NaN does not fit.
    if (std::ldexp(stored, -exponent) != value || !std::isfinite(stored)) return false;
  }
  return true;
}

/// Whether a 16-bit type holds all normalized fp32 scales and biases exactly.
bool FitIn(const QuantizedWeights& weights, bool bf16) {
  const int64_t experts = weights.spec.experts;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const float largest = std::max(RangeOf(weights.scales, experts, expert).largest,
                                   RangeOf(weights.biases, experts, expert).largest);
    const int exponent = NormalizingExponent(largest);
    if (!FitIn(weights.scales, experts, expert, exponent, bf16) ||
        !FitIn(weights.biases, experts, expert, exponent, bf16)) {
      return false;
    }
  }
  return true;
}

/// The type of scales and biases in tiles; kNone where no 16-bit type holds them exactly.
enum class ParameterType { kNone, kF16, kBf16 };
ParameterType ParameterTypeOf(const QuantizedWeights& weights) {
  switch (weights.spec.scale_type) {
    case ScaleType::kF32:
      if (FitIn(weights, false)) return ParameterType::kF16;
      return FitIn(weights, true) ? ParameterType::kBf16 : ParameterType::kNone;
    case ScaleType::kBf16:
    case ScaleType::kE8M0:
      return ParameterType::kBf16;
    default:
      return ParameterType::kF16;
  }
}

/// Whether fp16, the type of zeros in tiles, holds all zeros exactly.
bool ZerosFitF16(const TensorView& zeros) {
  if (zeros.dtype() == DType::kF16) return true;
  for (int64_t i = 0; i < zeros.ElementCount(); ++i) {
    const float zero = LoadScale(zeros, i);
    if (HalfToFloat(FloatToHalf(zero)) != zero) return false;
  }
  return true;
}

/// Whether weights can be tiled without rounding.
bool CanTile(const QuantizedWeights& weights, ParameterType parameters) {
  const WeightsSpec& spec = weights.spec;
  if (spec.format == Format::kFp32) return false;
  if (!GetFormatInfo(spec.format).quantized) return true;
  if (parameters == ParameterType::kNone) return false;
  if (SharedScaleRun(spec.group_size, spec.k, kTileK) < kSmallestGroup) return false;
  if (spec.has_zeros) return ZerosFitF16(weights.zeros);
  if (!spec.has_biases) return true;
  // Tiled biases have the scales' type, and a global scale does not apply to biases.
  return !spec.has_global_scale && spec.scale_type != ScaleType::kE8M0;
}

/// Whether fp16 holds an expert's decoded weights: no overflow, at most two bits lost to underflow.
bool FitsF16(CodeKind kind, const Range& values, const Range& scales, const Range& zeros,
             const Range& biases) {
  const CodeExponents exponents = ExponentsOf(kind, false);
  const float unit = std::ldexp(1.0F, -exponents.shift);
  const float largest = ((values.largest + zeros.largest) * scales.largest + biases.largest) * unit;
  if (!(largest <= 65000.0F)) return false;
  if (scales.largest == 0) return true;
  const float operand = std::ldexp(scales.smallest, -exponents.decode - exponents.shift);
  const float product = values.smallest * scales.smallest * unit;
  return operand >= 0x1p-14F && product >= 0x1p-16F;
}

/// Fills the planes of low and high bytes of up to 16 values / 2^exponent in a 16-bit type.
void FillPlanes(std::span<const float> values, int exponent, bool bf16, uint32_t* planes) {
  std::array<uint8_t, 16> low{};
  std::array<uint8_t, 16> high{};
  for (size_t i = 0; i < std::min<size_t>(values.size(), 16); ++i) {
    const float value = std::ldexp(values[i], -exponent);
    const uint16_t bits = bf16 ? FloatToBf16(value) : FloatToHalf(value);
    low[i] = static_cast<uint8_t>(bits & 255U);
    high[i] = static_cast<uint8_t>(bits >> 8);
  }
  std::memcpy(planes, low.data(), low.size());
  std::memcpy(planes + 4, high.data(), high.size());
}

/// Whether all zeros are integers in [0, 127], which fold into the bias of 2^7 that decoding
/// subtracts.
bool AreSmallIntegers(const TensorView& zeros) {
  constexpr float kLargest = 127;
  for (int64_t i = 0; i < zeros.ElementCount(); ++i) {
    const float zero = LoadScale(zeros, i);
    if (!(zero >= 0 && zero <= kLargest && zero == std::floor(zero))) return false;
  }
  return true;
}

/// Whether e4m3 holds every code less its zero exactly: integers from -16 up with integer zeros, or
/// values that are e4m3 numbers.
bool FitsFp8(CodeKind kind, std::span<const float> values, const TensorView& zeros) {
  const auto fits = [](float value) { return Fp8E4M3ToFloat(FloatToFp8E4M3(value)) == value; };
  if (kind == CodeKind::kInt4 && !zeros.empty()) {
    constexpr float kLeast = -16;
    return AreSmallIntegers(zeros) && values[0] - RangeOf(zeros, 1, 0).largest >= kLeast;
  }
  const bool known = kind == CodeKind::kFp4 || kind == CodeKind::kInt4 ||
                     kind == CodeKind::kTable3 || kind == CodeKind::kTable2;
  return known && zeros.empty() && std::all_of(values.begin(), values.end(), fits);
}

/// Whether 2:4 weights that can be tiled are kept as sparse tiles; others are expanded.
bool CanKeepSparse(const WeightsSpec& spec, const PrepareOptions& options) {
  return GetFormatInfo(spec.format).bits == kSparseBits && !options.marlin_w4;
}

bool IsTable(CodeKind kind) {
  return kind == CodeKind::kTable4 || kind == CodeKind::kTable3 || kind == CodeKind::kTable2;
}

int64_t BytesOfExpert(const TensorView& view, int64_t experts) {
  return view.empty() ? 0 : view.ByteCount() / experts;
}

}  // namespace

float LoadScale(const TensorView& view, int64_t i) {
  switch (view.dtype()) {
    case DType::kF16:
      return HalfToFloat(view.As<uint16_t>()[i]);
    case DType::kBf16:
      return Bf16ToFloat(view.As<uint16_t>()[i]);
    case DType::kF8E8M0:
      return E8M0ToFloat(view.As<uint8_t>()[i]);
    case DType::kF8E4M3:
      return Fp8E4M3ToFloat(view.As<uint8_t>()[i]);
    default:
      return view.As<float>()[i];
  }
}

Result<std::shared_ptr<const PreparedTiles>> PreparedTiles::Make(
    const QuantizedWeights& weights, const PrepareOptions& options, const Backend* backend,
    const std::shared_ptr<DeviceHandle>& device) {
  const WeightsSpec& spec = weights.spec;
  if (spec.k > kMaxK || spec.n > kMaxN) {
    return Status(Code::kUnsupported, "prepare: k up to " + std::to_string(kMaxK) +
                                          " and n up to " + std::to_string(kMaxN) + ", got " +
                                          std::to_string(spec.k) + " and " +
                                          std::to_string(spec.n));
  }
  if (!IsBuilt(KindOf(spec.format))) {
    return Status(Code::kUnsupported, "prepare: this build has no CUDA kernels for " +
                                          std::string(FormatName(spec.format)) +
                                          " (MARLIN_CUDA_KINDS of CMake)");
  }
  const ParameterType parameters = ParameterTypeOf(weights);
  const bool can_tile = CanTile(weights, parameters);
  const bool sparse = spec.sparsity == Sparsity::k24;
  if (sparse && !(can_tile && CanKeepSparse(spec, options))) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights dense, Expand24(weights));
    return Make(dense, options, backend, device);
  }
  auto prepared = std::make_shared<PreparedTiles>();
  prepared->spec = spec;
  prepared->backend = backend;
  prepared->kind_ = KindOf(spec.format);
  if (options.marlin_w4) MARLIN_RETURN_IF_ERROR(CheckMarlinW4(spec, can_tile));
  prepared->traits.marlin_w4 = options.marlin_w4;
  prepared->traits.tiled = can_tile && !options.marlin_w4;
  prepared->traits.sparse = sparse;
  // Validated weights have it.
  if (sparse) prepared->zero_code_ = CodeOfZero(ValuesOf(weights)).value_or(0);
  const DeviceScope scope(device->index);
  MARLIN_RETURN_IF_ERROR(prepared->Upload(weights, device));
  if (can_tile) {
    prepared->tiles_.bf16_parameters = parameters == ParameterType::kBf16;
    prepared->DescribeTiles(weights);
  }
  if (prepared->traits.marlin_w4) MARLIN_RETURN_IF_ERROR(prepared->UploadMarlinW4(weights, device));
  if (prepared->traits.tiled) MARLIN_RETURN_IF_ERROR(prepared->Pack(weights, device));
  return std::shared_ptr<const PreparedTiles>(std::move(prepared));
}

Status PreparedTiles::Upload(const QuantizedWeights& weights,
                             const std::shared_ptr<DeviceHandle>& device) {
  const int64_t experts = spec.experts;
  const FormatInfo& info = GetFormatInfo(spec.format);
  words_bytes_ = BytesOfExpert(weights.codes, experts);
  metadata_bytes_ = BytesOfExpert(weights.metadata, experts);
  scales_bytes_ = BytesOfExpert(weights.scales, experts);
  zeros_bytes_ = BytesOfExpert(weights.zeros, experts);
  biases_bytes_ = BytesOfExpert(weights.biases, experts);
  canonical_.bits = info.bits;
  canonical_.k = static_cast<int>(spec.k);
  canonical_.n = static_cast<int>(spec.n);
  canonical_.group_size = spec.group_size;
  canonical_.scale_type = ElementOf(ScaleDType(spec.scale_type));
  canonical_.zero_type = ElementOf(ScaleDType(spec.zero_type));
  canonical_.global_scale_divides = spec.global_scale_divides;
  canonical_.bias_type = ElementOf(BiasDType(spec.scale_type));
  if (!info.quantized) canonical_.dense_type = ElementOf(UnquantizedDType(spec.format));
  for (int64_t expert = 0; expert < experts; ++expert) {
    global_scales_.push_back(spec.has_global_scale ? weights.global_scale.As<float>()[expert]
                                                   : 1.0F);
  }

  std::array<float, kMaxValues> values{};
  const std::span<const float> known = ValuesOf(weights);
  std::copy_n(known.begin(), std::min(known.size(), kMaxValues), values.begin());
  std::array<uint32_t, kTableWords> planes{};
  if (IsTable(kind_)) {
    // At most 1, so that value x normalized scale stays in the range of fp16.
    const Range range = RangeOfValues(known);
    tiles_.table_exponent = ExponentOf(range.largest) + (range.largest > 0 ? 1 : 0);
    if (std::ldexp(1.0F, tiles_.table_exponent - 1) == range.largest) --tiles_.table_exponent;
    FillPlanes(known, tiles_.table_exponent, true, planes.data());
    FillPlanes(known, tiles_.table_exponent, false, planes.data() + kTableWords / 2);
  }
  MARLIN_ASSIGN_OR_RETURN(tables_, DeviceMemory::Allocate(device, sizeof(values) + sizeof(planes)));
  MARLIN_RETURN_IF_ERROR(device->errors.Check(
      cudaMemcpy(tables_.data(), values.data(), sizeof(values), cudaMemcpyHostToDevice),
      "cudaMemcpy of a table"));
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaMemcpy(tables_.data() + sizeof(values), planes.data(),
                                      sizeof(planes), cudaMemcpyHostToDevice),
                           "cudaMemcpy of a table"));
  const auto* on_device = reinterpret_cast<const float*>(tables_.data());
  canonical_.values = on_device;
  tiles_.values = on_device;
  tiles_.table = reinterpret_cast<const uint32_t*>(tables_.data() + sizeof(values));
  if (traits.tiled || traits.marlin_w4) return Status();

  // Every array begins at a multiple of 256 bytes.
  const auto padded = [&](int64_t bytes_of_expert) {
    return RoundUp(bytes_of_expert * experts, int64_t{256});
  };
  const int64_t total =
      padded(words_bytes_) + padded(scales_bytes_) + padded(zeros_bytes_) + padded(biases_bytes_);
  MARLIN_ASSIGN_OR_RETURN(memory_, DeviceMemory::Allocate(device, total));
  bytes = total;
  uint8_t* next = memory_.data();
  const auto upload = [&](const TensorView& view, int64_t bytes_of_expert) -> Result<void*> {
    if (view.empty()) return static_cast<void*>(nullptr);
    void* to = next;
    next += padded(bytes_of_expert);
    MARLIN_RETURN_IF_ERROR(device->errors.Check(
        cudaMemcpy(to, view.data(), static_cast<size_t>(view.ByteCount()), cudaMemcpyHostToDevice),
        "cudaMemcpy of weights"));
    return to;
  };
  MARLIN_ASSIGN_OR_RETURN(void* words, upload(weights.codes, words_bytes_));
  canonical_.words = static_cast<const uint32_t*>(words);
  MARLIN_ASSIGN_OR_RETURN(canonical_.scales, upload(weights.scales, scales_bytes_));
  MARLIN_ASSIGN_OR_RETURN(canonical_.zeros, upload(weights.zeros, zeros_bytes_));
  MARLIN_ASSIGN_OR_RETURN(canonical_.biases, upload(weights.biases, biases_bytes_));
  // A copy from pageable memory may return before its DMA is done.
  return device->errors.Check(cudaStreamSynchronize(nullptr), "upload of weights");
}

void PreparedTiles::DescribeTiles(const QuantizedWeights& weights) {
  const bool scaled = kind_ != CodeKind::kDense16;
  tiles_.k = static_cast<int>(spec.k);
  tiles_.n = static_cast<int>(spec.n);
  tiles_.groups_per_tile =
      scaled ? static_cast<int>(kTileK / SharedScaleRun(spec.group_size, spec.k, kTileK)) : 0;
  tiles_.zero_kind = spec.has_zeros    ? ZeroKind::kZeros
                     : spec.has_biases ? ZeroKind::kBiases
                                       : ZeroKind::kNone;
  tiles_.integer_zeros = spec.has_zeros && AreSmallIntegers(weights.zeros);
  tiles_.bf16_codes = spec.format == Format::kBf16;
  if (kind_ == CodeKind::kInt4) tiles_.offset = -static_cast<int>(FormatValues(spec.format)[0]);
  if (kind_ == CodeKind::kInt8) tiles_.offset = spec.format == Format::kS8 ? 128 : 0;
  const int parameters = tiles_.zero_kind == ZeroKind::kNone ? 1 : 2;
  tiles_.tile_bytes =
      TileCodeBytes(tile_kind()) + tiles_.groups_per_tile * kGroupBytes * parameters;
  tiles_.tiles_of_strip = static_cast<int>(CeilDivide(spec.k, int64_t{kTileK}));
  const int64_t strips = RoundUp(spec.n, int64_t{kBlockOutputs}) / kStripOutputs;
  expert_bytes_ = strips * tiles_.tiles_of_strip * tiles_.tile_bytes;
  bytes = expert_bytes_ * spec.experts;

  // An FP8 MMA takes 32 k of one group.
  constexpr int kMostGroups = kTileK / 32;
  traits.fits_fp8 = scaled && !spec.has_biases && tiles_.groups_per_tile <= kMostGroups &&
                    FitsFp8(kind_, ValuesOf(weights), weights.zeros);
  Range values = RangeOfValues(ValuesOf(weights));
  values.smallest = std::ldexp(values.smallest, -tiles_.table_exponent);
  values.largest = std::ldexp(values.largest, -tiles_.table_exponent);
  // Unquantized bf16 weights may exceed the range of fp16.
  traits.fits_f16 = scaled || spec.format == Format::kFp16;
  for (int64_t expert = 0; expert < spec.experts; ++expert) {
    Range scales = RangeOf(weights.scales, spec.experts, expert);
    Range biases = RangeOf(weights.biases, spec.experts, expert);
    const int exponent = scaled ? NormalizingExponent(std::max(scales.largest, biases.largest)) : 0;
    exponents_.push_back(exponent);
    scales = {std::ldexp(scales.smallest, exponent), std::ldexp(scales.largest, exponent)};
    biases = {0, std::ldexp(biases.largest, exponent - tiles_.table_exponent)};
    if (scaled) {
      traits.fits_f16 =
          traits.fits_f16 &&
          FitsF16(kind_, values, scales, RangeOf(weights.zeros, spec.experts, expert), biases);
    }
  }
}

Status PreparedTiles::Pack(const QuantizedWeights& weights,
                           const std::shared_ptr<DeviceHandle>& device) {
  MARLIN_ASSIGN_OR_RETURN(memory_, DeviceMemory::Allocate(device, bytes));
  const auto padded = [](int64_t size) { return RoundUp(size, int64_t{256}); };
  MARLIN_ASSIGN_OR_RETURN(
      const DeviceMemory staging,
      DeviceMemory::Allocate(device, padded(words_bytes_) + padded(metadata_bytes_) +
                                         padded(scales_bytes_) + padded(zeros_bytes_) +
                                         padded(biases_bytes_)));
  PackJob job;
  job.from = canonical_;
  job.to = tiles_;
  job.kind = kind_;
  for (int64_t expert = 0; expert < spec.experts; ++expert) {
    uint8_t* next = staging.data();
    const auto upload = [&](const TensorView& view, int64_t size) -> Result<void*> {
      if (size == 0) return static_cast<void*>(nullptr);
      void* to = next;
      next += padded(size);
      MARLIN_RETURN_IF_ERROR(
          device->errors.Check(cudaMemcpy(to, view.As<uint8_t>() + expert * size,
                                          static_cast<size_t>(size), cudaMemcpyHostToDevice),
                               "cudaMemcpy of weights"));
      return to;
    };
    MARLIN_ASSIGN_OR_RETURN(void* words, upload(weights.codes, words_bytes_));
    job.from.words = static_cast<const uint32_t*>(words);
    MARLIN_ASSIGN_OR_RETURN(void* metadata, upload(weights.metadata, metadata_bytes_));
    job.metadata = static_cast<const uint32_t*>(metadata);
    MARLIN_ASSIGN_OR_RETURN(job.from.scales, upload(weights.scales, scales_bytes_));
    MARLIN_ASSIGN_OR_RETURN(job.from.zeros, upload(weights.zeros, zeros_bytes_));
    MARLIN_ASSIGN_OR_RETURN(job.from.biases, upload(weights.biases, biases_bytes_));
    job.tiles = memory_.data() + expert * expert_bytes_;
    job.scale_factor = std::ldexp(1.0F, exponents_[static_cast<size_t>(expert)]);
    if (spec.k > 0 && spec.n > 0) {
      MARLIN_RETURN_IF_ERROR(
          device->errors.Check(LaunchPackTiles(job, nullptr), "packing of weights"));
      MARLIN_RETURN_IF_ERROR(
          device->errors.Check(cudaStreamSynchronize(nullptr), "packing of weights"));
    }
  }
  return Status();
}

TileView PreparedTiles::Tiles(int64_t expert) const {
  TileView view = tiles_;
  view.tiles = memory_.data() + expert * expert_bytes_;
  const auto i = static_cast<size_t>(expert);
  view.multiplier = std::ldexp(global_scales_[i], -exponents_[i]);
  if (spec.global_scale_divides) {
    view.divisor = std::ldexp(global_scales_[i], exponents_[i]);
    view.multiplier = 1.0F / view.divisor;
  }
  return view;
}

TileView PreparedTiles::Expanded(int64_t expert) const {
  TileView view = Tiles(expert);
  view.tiles = nullptr;
  view.tile_bytes += TileCodeBytes(kSparseBits) - kSparseTileBytes;
  return view;
}

CanonicalView PreparedTiles::Canonical(int64_t expert) const {
  CanonicalView view = canonical_;
  const auto advance = [&](const void* data, int64_t size) -> const void* {
    return data == nullptr ? nullptr : static_cast<const uint8_t*>(data) + expert * size;
  };
  view.words = static_cast<const uint32_t*>(advance(view.words, words_bytes_));
  view.scales = advance(view.scales, scales_bytes_);
  view.zeros = advance(view.zeros, zeros_bytes_);
  view.biases = advance(view.biases, biases_bytes_);
  view.global_scale = global_scales_[static_cast<size_t>(expert)];
  return view;
}

}  // namespace marlin::cuda
