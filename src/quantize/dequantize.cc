#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "base/view_checks.h"
#include "layout/input_transform.h"
#include "layout/packing.h"
#include "layout/parameters.h"
#include "layout/plain_weights.h"
#include "layout/weights_buffer.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"
#include "quantize/column_tile.h"
#include "quantize/quantizer.h"
#include "quantize/rounding.h"

namespace marlin {
namespace {

static_assert(kTileRows % kPackRun == 0);

/// Maps a code of one group of one column to its weight.
struct GroupMap {
  double scale = 1;
  double offset = 0;  ///< The bias, or -scale * zero: exact, because both have at most 24 bits.
  bool has_offset = false;

  /// Exact, or rounded to odd where the sum is longer than a double.
  double Apply(float value) const {
    const double product = scale * static_cast<double>(value);
    return has_offset ? AddToOdd(product, offset) : product;
  }
};

GroupMap MapOf(const QuantizedWeights& weights, int64_t expert, int64_t index) {
  GroupMap map;
  float scale = ParameterAt(weights.scales, index);
  // The effective scale is an fp32: stored scale times (or over) global scale, rounded once.
  const WeightsSpec& spec = weights.spec;
  if (spec.has_global_scale) {
    const float global = weights.global_scale.As<float>()[expert];
    scale = spec.global_scale_divides ? scale / global : scale * global;
  }
  map.scale = scale;
  map.has_offset = spec.has_zeros || spec.has_biases;
  if (spec.has_zeros) map.offset = -map.scale * ParameterAt(weights.zeros, index);
  if (spec.has_biases) map.offset = ParameterAt(weights.biases, index);
  return map;
}

template <typename Element>
class Decoder {
 public:
  using Stored = typename Element::Stored;

  Decoder(const QuantizedWeights& weights, const MutableTensorView& out)
      : weights_(weights),
        spec_(weights.spec),
        out_(out),
        bits_(GetFormatInfo(spec_.format).bits),
        groups_(GroupCount(spec_)),
        values_(FormatValues(spec_.format)) {
    if (!weights.codebook.empty()) values_ = weights.codebook;
  }

  /// Decodes one tile of columns of one expert.
  void DecodeTile(int64_t expert, int64_t n0) const {
    std::array<uint8_t, kTileRows * kTileColumns> codes;
    std::array<Stored, kTileRows * kTileColumns> tile;
    const int64_t columns = std::min(kTileColumns, spec_.n - n0);
    for (int64_t k0 = 0; k0 < spec_.k; k0 += kTileRows) {
      const TileRange range{k0, std::min(kTileRows, spec_.k - k0), n0, columns};
      if (bits_ > 8) {
        CopyTile(expert, range, tile.data());
      } else {
        const int64_t row =
            expert * WordsAlongK(spec_.format, spec_.k) + WordsAlongK(spec_.format, k0);
        UnpackColumns(bits_, weights_.codes.As<uint32_t>() + row * spec_.n + n0, spec_.n,
                      {codes.data(), kTileRows, range.rows, columns});
        for (int64_t c = 0; c < columns; ++c) {
          DecodeColumn(expert, n0 + c, range, codes.data() + c * kTileRows,
                       tile.data() + c * kTileRows);
        }
      }
      Store(expert, range, tile.data());
    }
  }

 private:
  void DecodeColumn(int64_t expert, int64_t n, const TileRange& range, const uint8_t* codes,
                    Stored* out) const {
    for (int64_t r = 0; r < range.rows;) {
      const int64_t group = (range.k0 + r) / spec_.group_size;
      const int64_t end = std::min(range.rows, (group + 1) * spec_.group_size - range.k0);
      const GroupMap map = MapOf(weights_, expert, (expert * groups_ + group) * spec_.n + n);
      if (bits_ <= 4) {
        Stored table[16];
        for (size_t code = 0; code < values_.size(); ++code) {
          table[code] = Element::Round(map.Apply(values_[code]));
        }
        for (; r < end; ++r) out[r] = table[codes[r]];
      } else {
        for (; r < end; ++r) out[r] = Element::Round(map.Apply(values_[codes[r]]));
      }
    }
  }

  void CopyTile(int64_t expert, const TileRange& range, Stored* tile) const {
    switch (weights_.codes.dtype()) {
      case DType::kBf16:
        return CopyTileAs<uint16_t>(expert, range, tile, Bf16ToFloat);
      case DType::kF16:
        return CopyTileAs<uint16_t>(expert, range, tile, HalfToFloat);
      default:
        return CopyTileAs<float>(expert, range, tile, [](float value) { return value; });
    }
  }

  template <typename Source, typename Widen>
  void CopyTileAs(int64_t expert, const TileRange& range, Stored* tile, Widen widen) const {
    const auto* from = weights_.codes.As<Source>() + expert * spec_.k * spec_.n;
    for (int64_t r = 0; r < range.rows; ++r) {
      const Source* row = from + (range.k0 + r) * spec_.n + range.n0;
      for (int64_t c = 0; c < range.columns; ++c) {
        tile[c * kTileRows + r] = Element::Round(static_cast<double>(widen(row[c])));
      }
    }
  }

  void Store(int64_t expert, const TileRange& range, const Stored* tile) const {
    const int axis = out_.rank() - 2;
    const int64_t k_stride = out_.stride(axis);
    const int64_t n_stride = out_.stride(axis + 1);
    Stored* origin = out_.As<Stored>() + range.k0 * k_stride + range.n0 * n_stride +
                     (out_.rank() == 3 ? expert * out_.stride(0) : 0);
    if (spec_.has_permutation) {
      const int32_t* const rows = weights_.permutation.As<int32_t>() + expert * spec_.k + range.k0;
      Stored* const column0 = origin - range.k0 * k_stride;
      for (int64_t r = 0; r < range.rows; ++r) {
        for (int64_t c = 0; c < range.columns; ++c) {
          column0[rows[r] * k_stride + c * n_stride] = tile[c * kTileRows + r];
        }
      }
      return;
    }
    if (k_stride == 1) {
      for (int64_t c = 0; c < range.columns; ++c) {
        std::copy_n(tile + c * kTileRows, range.rows, origin + c * n_stride);
      }
      return;
    }
    for (int64_t r = 0; r < range.rows; ++r) {
      for (int64_t c = 0; c < range.columns; ++c) {
        origin[r * k_stride + c * n_stride] = tile[c * kTileRows + r];
      }
    }
  }

  const QuantizedWeights& weights_;
  const WeightsSpec& spec_;
  const MutableTensorView& out_;
  int bits_;
  int64_t groups_;
  std::span<const float> values_;
};

template <typename Element>
Status DecodeAll(const QuantizedWeights& weights, const MutableTensorView& out) {
  const WeightsSpec& spec = weights.spec;
  const int64_t tiles = CeilDivide(spec.n, kTileColumns);
  return RunOnAllThreads(spec.experts * spec.k * spec.n, [&](ThreadPool& pool) -> Status {
    const Decoder<Element> decoder(weights, out);
    pool.Run(spec.experts * tiles, [&](int64_t task, int) {
      decoder.DecodeTile(task / tiles, task % tiles * kTileColumns);
    });
    return {};
  });
}

Status DecodeTo(const QuantizedWeights& weights, const MutableTensorView& out) {
  return WithElement(out.dtype(),
                     [&]<typename Element>() { return DecodeAll<Element>(weights, out); });
}

/// fp32 columns [n, k] that are transformed together, so that rows are read in runs.
constexpr int64_t kColumnsTogether = 16;

template <typename Element>
void StoreColumns(const double* columns, const TileRange& range, const MutableTensorView& out,
                  int64_t at) {
  const int axis = out.rank() - 2;
  auto* const to = out.As<typename Element::Stored>() + at + range.n0 * out.stride(axis + 1);
  for (int64_t k = 0; k < range.rows; ++k) {
    for (int64_t c = 0; c < range.columns; ++c) {
      to[k * out.stride(axis) + c * out.stride(axis + 1)] =
          Element::Round(columns[c * range.rows + k]);
    }
  }
}

/// Transforms columns of fp32 [experts, k, n] and writes them, rounded once.
void TransformTile(const QuantizedWeights& weights, const float* decoded, int64_t expert,
                   int64_t n0, const MutableTensorView& out) {
  const WeightsSpec& spec = weights.spec;
  const TileRange range{0, spec.k, n0, std::min(kColumnsTogether, spec.n - n0)};
  std::vector<double> columns(static_cast<size_t>(range.columns * spec.k));
  for (int64_t k = 0; k < spec.k; ++k) {
    const float* const row = decoded + (expert * spec.k + k) * spec.n + n0;
    for (int64_t c = 0; c < range.columns; ++c) {
      columns[static_cast<size_t>(c * spec.k + k)] = row[c];
    }
  }
  if (spec.input_hadamard > 0) {
    HadamardInPlace(columns.data(), range.columns * spec.k, spec.input_hadamard);
  }
  if (spec.has_input_scale) {
    const float* const scale = weights.input_scale.As<float>() + expert * spec.k;
    for (int64_t i = 0; i < range.columns * spec.k; ++i) {
      columns[static_cast<size_t>(i)] *= scale[i % spec.k];
    }
  }
  const int64_t at = out.rank() == 3 ? expert * out.stride(0) : 0;
  WithElement(out.dtype(),
              [&]<typename Element>() { StoreColumns<Element>(columns.data(), range, out, at); });
}

/// Decodes to fp32 in the order of rows, then undoes the transforms of the input.
Status DecodeTransformed(const QuantizedWeights& weights, const MutableTensorView& out) {
  const WeightsSpec& spec = weights.spec;
  const Shape shape{spec.experts, spec.k, spec.n};
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer decoded,
                          AlignedBuffer::Allocate(shape.ElementCount() * 4));
  MARLIN_RETURN_IF_ERROR(
      DecodeTo(weights, MutableTensorView(decoded.As<float>(0), DType::kF32, shape)));
  return RunOnAllThreads(shape.ElementCount(), [&](ThreadPool& pool) -> Status {
    const int64_t tiles = CeilDivide(spec.n, kColumnsTogether);
    pool.Run(spec.experts * tiles, [&](int64_t task, int) {
      TransformTile(weights, decoded.As<float>(0), task / tiles, task % tiles * kColumnsTogether,
                    out);
    });
    return {};
  });
}

}  // namespace

Status Dequantize(const QuantizedWeights& weights, const MutableTensorView& out) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  MARLIN_RETURN_IF_ERROR(CheckDense("out", out));
  const WeightsSpec& spec = weights.spec;
  const Shape matrix{spec.k, spec.n};
  const Shape stack{spec.experts, spec.k, spec.n};
  if (!(out.shape() == stack) && !(spec.experts == 1 && out.shape() == matrix)) {
    return {Code::kInvalidArgument, "out: expected " +
                                        (spec.experts == 1 ? matrix : stack).ToString() + ", got " +
                                        out.shape().ToString()};
  }
  MARLIN_RETURN_IF_ERROR(CheckData("out", out));
  MARLIN_RETURN_IF_ERROR(CheckDistinctElements("out", out, true));
  const std::pair<const char*, const TensorView&> parts[] = {
      {"codes", weights.codes},
      {"scales", weights.scales},
      {"zeros", weights.zeros},
      {"biases", weights.biases},
      {"global_scale", weights.global_scale},
      {"metadata", weights.metadata},
      {"permutation", weights.permutation},
      {"input_scale", weights.input_scale},
      {"super_scales", weights.super_scales},
      {"super_biases", weights.super_biases}};
  for (const auto& [name, part] : parts) {
    MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, name, part, false));
  }
  if (out.ElementCount() == 0) return {};
  MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights dense,
                          ConvertTo(PlainSpec(weights.spec), weights));
  if (spec.has_input_scale || spec.input_hadamard > 0) return DecodeTransformed(dense, out);
  return DecodeTo(dense, out);
}

Result<QuantizedWeights> FoldInput(const QuantizedWeights& weights) {
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  if (!TransformsInput(weights.spec)) return weights;
  const WeightsSpec spec = FoldedSpec(weights.spec);
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  const MutableTensorView out(buffer.codes, DType::kF32, {spec.experts, spec.k, spec.n});
  MARLIN_RETURN_IF_ERROR(Dequantize(weights, out));
  return std::move(buffer.weights);
}

}  // namespace marlin
