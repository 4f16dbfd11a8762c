#include "backends/cuda/weights/prepared_tiles.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/layout/sparse_layout.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/weight_pieces.h"
#include "backends/cuda/weights/weight_upload.h"
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

Element StoredElement(DType type) {
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

std::span<const float> ValuesOf(const QuantizedWeights& weights) {
  if (!weights.codebook.empty()) return weights.codebook;
  return FormatValues(weights.spec.format);
}

NumberRange RangeOfValues(std::span<const float> values) {
  NumberRange range;
  for (const float value : values) range.Add(value);
  return range;
}

/// The largest e with 2^e <= magnitude.
int ExponentOf(float magnitude) { return magnitude == 0 ? 0 : std::ilogb(magnitude); }

/// The exponent of the power of two that scales an expert's largest parameter to [2^15, 2^16), or
/// as near as that power and its inverse are normal numbers.
int NormalizingExponent(const ExpertRanges& ranges) {
  const float largest = std::max(ranges.scales.largest, ranges.biases.largest);
  if (largest == 0) return 0;
  return std::clamp(15 - ExponentOf(largest), -100, 120);
}

/// The type of scales and biases in tiles; kNone where no 16-bit type holds them exactly.
enum class ParameterType { kNone, kF16, kBf16 };
ParameterType ParameterTypeOf(const WeightsSpec& spec, std::span<const ExpertRanges> ranges) {
  if (spec.scale_type == ScaleType::kBf16 || spec.scale_type == ScaleType::kE8M0) {
    return ParameterType::kBf16;
  }
  if (spec.scale_type != ScaleType::kF32) return ParameterType::kF16;
  const auto fit = [&](auto fits) {
    return std::all_of(ranges.begin(), ranges.end(), [&](const ExpertRanges& expert) {
      const int exponent = NormalizingExponent(expert);
      return (expert.scales.*fits)(exponent) && (expert.biases.*fits)(exponent);
    });
  };
  if (fit(&NumberRange::FitsF16)) return ParameterType::kF16;
  return fit(&NumberRange::FitsBf16) ? ParameterType::kBf16 : ParameterType::kNone;
}

/// Whether weights can be tiled without rounding.
bool CanTile(const WeightsSpec& spec, std::span<const ExpertRanges> ranges,
             ParameterType parameters) {
  if (spec.format == Format::kFp32) return false;
  if (!GetFormatInfo(spec.format).quantized) return true;
  if (parameters == ParameterType::kNone) return false;
  if (SharedScaleRun(spec.group_size, spec.k, kTileK) < kSmallestGroup) return false;
  if (spec.has_zeros) {
    // fp16 is the type of zeros in tiles.
    return std::all_of(ranges.begin(), ranges.end(),
                       [](const ExpertRanges& expert) { return expert.zeros.FitsF16(0); });
  }
  if (!spec.has_biases) return true;
  // Tiled biases have the scales' type, and a global scale does not apply to biases.
  return !spec.has_global_scale && spec.scale_type != ScaleType::kE8M0;
}

/// Whether fp16 holds an expert's decoded weights: no overflow, at most two bits lost to underflow.
bool FitsF16(CodeKind kind, const NumberRange& values, const NumberRange& scales,
             const NumberRange& zeros, const NumberRange& biases) {
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

/// Whether e4m3 holds every code less its zero exactly: integers from -16 up with integer zeros, or
/// values that are e4m3 numbers. `zeros` is null where there are none.
bool FitsFp8(CodeKind kind, std::span<const float> values, const NumberRange* zeros) {
  const auto fits = [](float value) { return Fp8E4M3ToFloat(FloatToFp8E4M3(value)) == value; };
  if (kind == CodeKind::kInt4 && zeros != nullptr) {
    constexpr float kLeast = -16;
    return zeros->AreSmallIntegers() && values[0] - zeros->largest >= kLeast;
  }
  const bool known = kind == CodeKind::kFp4 || kind == CodeKind::kInt4 ||
                     kind == CodeKind::kTable3 || kind == CodeKind::kTable2;
  return known && zeros == nullptr && std::all_of(values.begin(), values.end(), fits);
}

/// Whether 2:4 weights that can be tiled are kept as sparse tiles; others are expanded.
bool CanKeepSparse(const WeightsSpec& spec, const PrepareOptions& options) {
  return GetFormatInfo(spec.format).bits == kSparseBits && !options.marlin_w4;
}

bool IsTable(CodeKind kind) {
  return kind == CodeKind::kTable4 || kind == CodeKind::kTable3 || kind == CodeKind::kTable2;
}

/// The tables of a kind's code values. The planes hold the values divided by 2^exponent, which is
/// chosen here; kinds without planes leave it.
CodeTables TablesOf(CodeKind kind, std::span<const float> known, int* exponent) {
  CodeTables tables;
  std::copy_n(known.begin(), std::min(known.size(), tables.values.size()), tables.values.begin());
  if (!IsTable(kind)) return tables;
  // At most 1, so that value x normalized scale stays in the range of fp16.
  const float largest = RangeOfValues(known).largest;
  *exponent = ExponentOf(largest) + (largest > 0 ? 1 : 0);
  if (std::ldexp(1.0F, *exponent - 1) == largest) --*exponent;
  uint32_t* const planes = tables.planes.data();
  FillPlanes(known, *exponent, true, planes);
  FillPlanes(known, *exponent, false, planes + tables.planes.size() / 2);
  return tables;
}

/// The size of an array, of all experts together.
int64_t PaddedBytes(int64_t expert_bytes, int64_t experts) {
  return RoundUp(expert_bytes * experts, int64_t{256});
}

/// Errors: kUnsupported for dimensions beyond a grid's, and for kinds without kernels.
Status CheckPreparable(const WeightsSpec& spec) {
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
  return {};
}

}  // namespace

Result<std::shared_ptr<const PreparedTiles>> PreparedTiles::Make(
    std::span<const WeightColumns> columns, const PrepareOptions& options, const Backend* backend,
    WeightUpload& upload) {
  const QuantizedWeights& model = *columns.front().weights;
  WeightsSpec spec = model.spec;
  spec.n = CountColumns(columns);
  MARLIN_RETURN_IF_ERROR(CheckPreparable(spec));
  const std::vector<ExpertRanges> ranges = RangesOf(columns, upload);
  const ParameterType parameters = ParameterTypeOf(spec, ranges);
  const bool can_tile = CanTile(spec, ranges, parameters);
  const bool sparse = spec.sparsity == Sparsity::k24;
  if (sparse && !(can_tile && CanKeepSparse(spec, options))) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights joined, JoinColumns(columns));
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights dense, Expand24(joined));
    const WeightColumns all{&dense, 0, 1, dense.spec.n};
    return Make({&all, 1}, options, backend, upload);
  }
  if (options.marlin_w4) MARLIN_RETURN_IF_ERROR(CheckMarlinW4(spec, can_tile));
  auto prepared = std::make_shared<PreparedTiles>();
  prepared->spec = spec;
  prepared->backend = backend;
  prepared->kind_ = KindOf(spec.format);
  prepared->traits.marlin_w4 = options.marlin_w4;
  prepared->traits.tiled = can_tile && !options.marlin_w4;
  prepared->traits.sparse = sparse;
  // Validated weights have it.
  if (sparse) prepared->zero_code_ = CodeOfZero(ValuesOf(model)).value_or(0);
  const DeviceScope scope(upload.device()->index);
  prepared->DescribeCanonical(model);
  MARLIN_RETURN_IF_ERROR(prepared->MakeTables(model, upload));
  if (can_tile) {
    prepared->tiles_.bf16_parameters = parameters == ParameterType::kBf16;
    prepared->DescribeTiles(model, ranges);
  }
  if (options.marlin_w4) {
    MARLIN_RETURN_IF_ERROR(prepared->UploadMarlinW4(model, upload.device()));
    return std::shared_ptr<const PreparedTiles>(std::move(prepared));
  }
  const Status sent =
      can_tile ? prepared->SendTiles(columns, upload) : prepared->SendCanonical(columns, upload);
  if (sent.ok()) return std::shared_ptr<const PreparedTiles>(std::move(prepared));
  // Pieces sent before may still be written to the memory that is freed now. The first error
  // counts.
  static_cast<void>(upload.Finish());
  return sent;
}

void PreparedTiles::DescribeCanonical(const QuantizedWeights& model) {
  const FormatInfo& info = GetFormatInfo(spec.format);
  const auto expert_bytes = [&](const TensorView& view) {
    return view.empty() ? 0 : view.dim(1) * spec.n * DTypeBytes(view.dtype());
  };
  words_bytes_ = expert_bytes(model.codes);
  scales_bytes_ = expert_bytes(model.scales);
  zeros_bytes_ = expert_bytes(model.zeros);
  biases_bytes_ = expert_bytes(model.biases);
  canonical_.bits = info.bits;
  canonical_.k = static_cast<int>(spec.k);
  canonical_.n = static_cast<int>(spec.n);
  canonical_.group_size = spec.group_size;
  canonical_.scale_type = StoredElement(ScaleDType(spec.scale_type));
  canonical_.zero_type = StoredElement(ScaleDType(spec.zero_type));
  canonical_.global_scale_divides = spec.global_scale_divides;
  canonical_.bias_type = StoredElement(BiasDType(spec.scale_type));
  if (!info.quantized) canonical_.dense_type = StoredElement(UnquantizedDType(spec.format));
  for (int64_t expert = 0; expert < spec.experts; ++expert) {
    global_scales_.push_back(spec.has_global_scale ? model.global_scale.As<float>()[expert] : 1.0F);
  }
}

Status PreparedTiles::MakeTables(const QuantizedWeights& model, WeightUpload& upload) {
  const CodeTables tables = TablesOf(kind_, ValuesOf(model), &tiles_.table_exponent);
  MARLIN_ASSIGN_OR_RETURN(tables_, upload.Tables(tables));
  const uint8_t* const on_device = tables_->data();
  canonical_.values = reinterpret_cast<const float*>(on_device + offsetof(CodeTables, values));
  tiles_.values = canonical_.values;
  tiles_.table = reinterpret_cast<const uint32_t*>(on_device + offsetof(CodeTables, planes));
  return {};
}

Status PreparedTiles::SendCanonical(std::span<const WeightColumns> columns, WeightUpload& upload) {
  bytes = PaddedBytes(words_bytes_, spec.experts) + PaddedBytes(scales_bytes_, spec.experts) +
          PaddedBytes(zeros_bytes_, spec.experts) + PaddedBytes(biases_bytes_, spec.experts);
  MARLIN_ASSIGN_OR_RETURN(memory_, DeviceMemory::Allocate(upload.device(), bytes));
  uint8_t* next = memory_.data();
  const auto place = [&](int64_t expert_bytes) -> void* {
    return expert_bytes == 0 ? nullptr
                             : std::exchange(next, next + PaddedBytes(expert_bytes, spec.experts));
  };
  canonical_.words = static_cast<const uint32_t*>(place(words_bytes_));
  canonical_.scales = place(scales_bytes_);
  canonical_.zeros = place(zeros_bytes_);
  canonical_.biases = place(biases_bytes_);
  return SendPieces(columns, upload, [&](const WeightPiece& piece, cudaStream_t stream) {
    const CanonicalView to = Canonical(piece.expert);
    cudaError_t error = cudaSuccess;
    const auto copy = [&](const void* from, const void* matrix, int64_t expert_bytes, DType type) {
      if (from == nullptr || error != cudaSuccess) return;
      const auto pitch = static_cast<size_t>(spec.n * DTypeBytes(type));
      const auto width = static_cast<size_t>(piece.columns * DTypeBytes(type));
      // The views are those that kernels read.
      auto* const first =
          static_cast<uint8_t*>(const_cast<void*>(matrix)) + piece.first_column * DTypeBytes(type);
      error = cudaMemcpy2DAsync(first, pitch, from, width, width,
                                static_cast<size_t>(expert_bytes) / pitch, cudaMemcpyDeviceToDevice,
                                stream);
    };
    const QuantizedWeights& model = *columns.front().weights;
    copy(piece.words, to.words, words_bytes_, model.codes.dtype());
    copy(piece.scales, to.scales, scales_bytes_, model.scales.dtype());
    copy(piece.zeros, to.zeros, zeros_bytes_, model.zeros.dtype());
    copy(piece.biases, to.biases, biases_bytes_, model.biases.dtype());
    return error;
  });
}

void PreparedTiles::DescribeTiles(const QuantizedWeights& model,
                                  std::span<const ExpertRanges> ranges) {
  const bool scaled = kind_ != CodeKind::kDense16;
  NumberRange zeros;
  for (const ExpertRanges& expert : ranges) zeros.Add(expert.zeros);
  tiles_.k = static_cast<int>(spec.k);
  tiles_.n = static_cast<int>(spec.n);
  tiles_.groups_per_tile =
      scaled ? static_cast<int>(kTileK / SharedScaleRun(spec.group_size, spec.k, kTileK)) : 0;
  tiles_.zero_kind = spec.has_zeros    ? ZeroKind::kZeros
                     : spec.has_biases ? ZeroKind::kBiases
                                       : ZeroKind::kNone;
  tiles_.integer_zeros = spec.has_zeros && zeros.AreSmallIntegers();
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
                    FitsFp8(kind_, ValuesOf(model), spec.has_zeros ? &zeros : nullptr);
  const NumberRange values = RangeOfValues(ValuesOf(model)).Scaled(-tiles_.table_exponent);
  // Unquantized bf16 weights may exceed the range of fp16.
  traits.fits_f16 = scaled || spec.format == Format::kFp16;
  for (const ExpertRanges& expert : ranges) {
    const int exponent = scaled ? NormalizingExponent(expert) : 0;
    exponents_.push_back(exponent);
    if (!scaled) continue;
    traits.fits_f16 =
        traits.fits_f16 && FitsF16(kind_, values, expert.scales.Scaled(exponent), expert.zeros,
                                   expert.biases.Scaled(exponent - tiles_.table_exponent));
  }
}

Status PreparedTiles::SendTiles(std::span<const WeightColumns> columns, WeightUpload& upload) {
  MARLIN_ASSIGN_OR_RETURN(memory_, DeviceMemory::Allocate(upload.device(), bytes));
  return SendPieces(columns, upload, [&](const WeightPiece& piece, cudaStream_t stream) {
    PackJob job;
    job.from = canonical_;
    job.from.n = static_cast<int>(piece.columns);
    job.from.words = static_cast<const uint32_t*>(piece.words);
    job.from.scales = piece.scales;
    job.from.zeros = piece.zeros;
    job.from.biases = piece.biases;
    job.metadata = static_cast<const uint32_t*>(piece.metadata);
    job.to = tiles_;
    job.kind = kind_;
    const auto strip = static_cast<int>(piece.first_column / kStripOutputs);
    job.tiles =
        memory_.data() + piece.expert * expert_bytes_ + TileOffset(tiles_, strip, /*tile=*/0);
    job.scale_factor = std::ldexp(1.0F, exponents_[static_cast<size_t>(piece.expert)]);
    return LaunchPackTiles(job, stream);
  });
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
