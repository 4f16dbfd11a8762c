// DequantizeLinear: codes with one scale, one for each index of an axis, or one for each block.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/readers/onnx/onnx_weights.h"
#include "layout/parameters.h"

namespace marlin {
namespace {

/// How the codes of an integer type are held: value = code - offset.
struct Held {
  Format format = Format::kU8;
  int offset = 0;    ///< -2 for int2, its lowest value.
  uint8_t flip = 0;  ///< Two's complement of the source to our codes.
};

/// A matrix as its DequantizeLinear node describes it.
struct Dequantized {
  const OnnxSource* codes = nullptr;
  const OnnxSource* scales = nullptr;
  const OnnxSource* zeros = nullptr;  ///< Null: none.
  bool out_in = false;                ///< The matrix is [out, in].
  int64_t k = 0;
  int64_t n = 0;
  int64_t axis = 1;
  int64_t block = 0;  ///< 0: one scale for the matrix, or one for each index of the axis.

  int64_t Index(int64_t k_at, int64_t n_at) const {
    return out_in ? n_at * k + k_at : k_at * n + n_at;
  }
  /// The number of the scale of a weight.
  int64_t ScaleIndex(int64_t k_at, int64_t n_at) const {
    const int64_t row = out_in ? n_at : k_at;
    const int64_t column = out_in ? k_at : n_at;
    const int64_t columns = out_in ? k : n;
    if (block == 0) return scales->count() == 1 ? 0 : (axis == 0 ? row : column);
    return axis == 0 ? row / block * columns + column
                     : row * CeilDivide(columns, block) + column / block;
  }
  bool AlongK() const { return axis == (out_in ? 1 : 0); }
};

bool IsFloatCode(OnnxType type) {
  return type == OnnxType::kF8E4M3 || type == OnnxType::kF8E5M2 || type == OnnxType::kF4E2M1;
}

Status CheckDequantize(const Dequantized& m) {
  const OnnxTensor& codes = m.codes->tensor;
  const Shape& shape = codes.shape;
  const int rank = shape.rank();
  const OnnxType types[] = {OnnxType::kI8,     OnnxType::kU8, OnnxType::kI4,     OnnxType::kU4,
                            OnnxType::kI2,     OnnxType::kU2, OnnxType::kF8E4M3, OnnxType::kF8E5M2,
                            OnnxType::kF4E2M1, OnnxType::kI32};
  if (std::find(std::begin(types), std::end(types), codes.type) == std::end(types)) {
    return UnsupportedNode(
        fmt::format("codes of type {} are not supported", OnnxTypeName(codes.type)));
  }
  const OnnxType scale = m.scales->tensor.type;
  if (scale != OnnxType::kF32 && scale != OnnxType::kF16 && scale != OnnxType::kBf16 &&
      scale != OnnxType::kF8E8M0) {
    return MalformedNode("scales of type " + OnnxTypeName(scale));
  }
  Shape expected;  // The shape of the scales.
  const bool whole = m.block == 0 && m.scales->count() == 1;
  if (!whole && (m.axis < 0 || m.axis >= rank || m.block < 0)) {
    return MalformedNode(
        fmt::format("axis {} of {} dimensions, block_size {}", m.axis, rank, m.block));
  }
  for (int i = 0; i < rank && !whole; ++i) {
    if (m.block != 0) {
      expected.Append(i == m.axis ? CeilDivide(shape[i], m.block) : shape[i]);
    } else if (i == m.axis) {
      expected.Append(shape[i]);
    }
  }
  const bool fits = whole || m.scales->tensor.shape == expected;
  const bool zeros_fit =
      m.zeros == nullptr ||
      (m.zeros->tensor.type == codes.type && m.zeros->count() == m.scales->count() &&
       (!(IsFloatCode(codes.type) || codes.type == OnnxType::kI32) ||
        std::all_of(m.zeros->data, m.zeros->data + m.zeros->tensor.bytes,
                    [](std::byte byte) { return byte == std::byte{0}; })));
  if (fits && zeros_fit) return {};
  const OnnxTensor& wrong = fits ? m.zeros->tensor : m.scales->tensor;
  return MalformedNode(fmt::format("\"{}\" {} {} does not fit {} {} (axis={}, block_size={})",
                                   Printable(wrong.name), OnnxTypeName(wrong.type),
                                   wrong.shape.ToString(), OnnxTypeName(codes.type),
                                   shape.ToString(), m.axis, m.block));
}

/// Whether a matrix is used as [out, in]. Without a user, blocks are taken to run along k.
bool IsOutIn(std::string_view value, const Dequantized& m, const OnnxUses& uses) {
  const bool blocks_along_columns = m.block != 0 && m.axis == 1 && !uses.IsUsed(value);
  const SourceLayout fallback = blocks_along_columns ? SourceLayout::kOutIn : SourceLayout::kInOut;
  return uses.LayoutOf(value).value_or(fallback) == SourceLayout::kOutIn;
}

Held HeldAs(OnnxType type, bool zeros) {
  switch (type) {
    case OnnxType::kI4:
      return zeros ? Held{Format::kU4, 8, 8} : Held{Format::kS4, 0, 8};
    case OnnxType::kU4:
      return {Format::kU4, 0, 0};
    case OnnxType::kI2:
      return {Format::kInt2, 0, 2};
    case OnnxType::kU2:
      return {Format::kInt2, -2, 0};
    case OnnxType::kI8:
      return {Format::kS8, 0, 0};
    case OnnxType::kF8E4M3:
      return {Format::kFp8E4M3, 0, 0};
    case OnnxType::kF8E5M2:
      return {Format::kFp8E5M2, 0, 0};
    case OnnxType::kF4E2M1:
      return {Format::kFp4E2M1, 0, 0};
    default:
      return {Format::kU8, 0, 0};
  }
}

/// Zeros of floats are 0 by definition, of signed integers often.
bool HasZeros(const Dequantized& m) {
  const OnnxType type = m.codes->tensor.type;
  if (IsFloatCode(type)) return false;
  if (type == OnnxType::kU8 || type == OnnxType::kU4 || type == OnnxType::kU2) return true;
  for (int64_t i = 0; m.zeros != nullptr && i < m.zeros->count(); ++i) {
    if (m.zeros->Integer(i) != 0) return true;
  }
  return false;
}

WeightsSpec DequantizedSpec(const Dequantized& m, const Held& held) {
  // A scale for each k, or for few of them, has no format.
  const bool per_k = m.scales->count() > 1 && m.AlongK() != (m.block != 0);
  const int64_t group = m.block != 0 ? std::min(m.block, m.k) : m.k;
  WeightsSpec spec{.format = Format::kFp32, .k = m.k, .n = m.n, .group_size = m.k};
  if (!per_k && (group % kGroupGranule == 0 || group == m.k)) {
    spec.format = held.format;
    spec.group_size = group;
    const OnnxType scale = m.scales->tensor.type;
    spec.scale_type =
        scale == OnnxType::kF8E8M0 ? ScaleType::kE8M0 : *ScaleTypeOf(*OnnxDType(scale));
    spec.has_zeros = HasZeros(m);
  }
  return spec;
}

float ValueAt(const Dequantized& m, int64_t index, int64_t scale_index) {
  const OnnxTensor& codes = m.codes->tensor;
  const float scale = ParameterAt(m.scales->data, *OnnxDType(m.scales->tensor.type), scale_index);
  if (codes.type == OnnxType::kF4E2M1) {
    const int bit = static_cast<int>(index % 2) * 4;
    const auto code = static_cast<uint8_t>(m.codes->data[index / 2]) >> bit & 15;
    return FormatValues(Format::kFp4E2M1)[static_cast<size_t>(code)] * scale;
  }
  if (IsFloatCode(codes.type))
    return ParameterAt(m.codes->data, *OnnxDType(codes.type), index) * scale;
  const int zero =
      m.zeros == nullptr || codes.type == OnnxType::kI32 ? 0 : m.zeros->Integer(scale_index);
  if (codes.type == OnnxType::kI32) {
    return static_cast<float>(static_cast<int32_t>(WordAt(m.codes->data, index))) * scale;
  }
  return static_cast<float>(m.codes->Integer(index) - zero) * scale;
}

void FillDequantized(const Dequantized& m, const Held& held, WeightsBuffer* buffer,
                     ThreadPool& pool) {
  const WeightsSpec& spec = buffer->weights.spec;
  if (!GetFormatInfo(spec.format).quantized) {
    const auto values = [&](int64_t n, float* out) {
      for (int64_t k = 0; k < m.k; ++k) out[k] = ValueAt(m, m.Index(k, n), m.ScaleIndex(k, n));
    };
    return StoreFloatRows(values, *buffer, pool);
  }
  const int bits = OnnxBits(m.codes->tensor.type);
  const auto unpack = [&](int64_t n, uint8_t* codes) {
    for (int64_t k = 0; k < m.k; ++k) {
      const int64_t bit = m.Index(k, n) * bits;
      const auto byte = static_cast<uint8_t>(m.codes->data[bit / 8]);
      codes[k] = static_cast<uint8_t>((byte >> (bit % 8) & ((1 << bits) - 1)) ^ held.flip);
    }
  };
  PackByteRows(unpack, *buffer, pool);
  const int64_t width = DTypeBytes(ScaleDType(spec.scale_type));
  for (int64_t g = 0; g < GroupCount(spec); ++g) {
    for (int64_t n = 0; n < m.n; ++n) {
      const int64_t from = m.ScaleIndex(g * spec.group_size, n);
      const int64_t to = g * m.n + n;
      std::memcpy(static_cast<std::byte*>(buffer->scales) + to * width,
                  m.scales->data + from * width, static_cast<size_t>(width));
      if (!spec.has_zeros) continue;
      const int zero = m.zeros == nullptr ? 0 : m.zeros->Integer(from);
      static_cast<uint16_t*>(buffer->zeros)[to] =
          FloatToHalf(static_cast<float>(zero + held.offset));
    }
  }
}

/// A quantized tensor that is no matrix: its values in fp32.
Result<std::function<void(std::byte*)>> DequantizedValues(const Dequantized& m) {
  const Shape& shape = m.codes->tensor.shape;
  if (!(Checked(m.codes->count()) * Checked(4)).valid())
    return MalformedNode(fmt::format("the size of {} overflows", shape.ToString()));
  // Elements of one scale follow each other, `inner` at a time, for each index of the axis.
  int64_t inner = 1;
  for (int i = static_cast<int>(m.axis) + 1; i < shape.rank(); ++i) inner *= shape[i];
  const int64_t length = m.scales->count() == 1 ? 1 : shape[static_cast<int>(m.axis)];
  const int64_t block = std::max<int64_t>(m.block, 1);
  return std::function<void(std::byte*)>([m, inner, length, block](std::byte* out) {
    const int64_t blocks = CeilDivide(length, block);
    for (int64_t i = 0; i < m.codes->count(); ++i) {
      int64_t scale = 0;
      if (m.scales->count() > 1) {
        const int64_t at = i / inner % length;
        scale =
            m.block == 0 ? at : (i / (inner * length) * blocks + at / block) * inner + i % inner;
      }
      const float value = ValueAt(m, i, scale);
      std::memcpy(out + i * 4, &value, sizeof(value));
    }
  });
}

}  // namespace

Result<std::vector<OnnxWeights>> ReadOnnxDequantize(const OnnxNode& node, FindOnnxSource find,
                                                    const OnnxUses& uses) {
  std::vector<OnnxWeights> weights;
  Dequantized m;
  m.codes = find(node.Input(0));
  if (m.codes == nullptr) return weights;  // It dequantizes activations.
  // Optimizers merge equal initializers, and a weight may have several users.
  if (m.codes->scales != nullptr && m.codes->scales == find(node.Input(1))) {
    return weights;
  }
  m.scales = find(node.Input(1));
  m.zeros = find(node.Input(2));
  if (m.scales == nullptr || (m.zeros == nullptr && !node.Input(2).empty())) {
    return UnsupportedNode("its scales or zeros are no initializers");
  }
  const OnnxTensor& codes = m.codes->tensor;
  const int rank = codes.shape.rank();
  m.axis = node.Integer("axis", 1);
  if (m.axis < 0) m.axis += rank;
  m.block = node.Integer("block_size", 0);
  if (m.block == 0 && m.scales->count() == 1) m.axis = 0;
  MARLIN_RETURN_IF_ERROR(CheckDequantize(m));
  weights.push_back({.codes = m.codes, .scales = m.scales, .zeros = m.zeros});
  if (rank != 2 || codes.type == OnnxType::kI32 || codes.bytes == 0) {
    MARLIN_ASSIGN_OR_RETURN(weights[0].values, DequantizedValues(m));
    return weights;
  }
  m.out_in = IsOutIn(node.outputs.empty() ? std::string_view() : node.outputs.front(), m, uses);
  m.k = codes.shape[m.out_in ? 1 : 0];
  m.n = codes.shape[m.out_in ? 0 : 1];
  const Held held = HeldAs(codes.type, HasZeros(m));
  weights[0].spec = DequantizedSpec(m, held);
  weights[0].fill = [m, held](WeightsBuffer* buffer, ThreadPool& pool) {
    FillDequantized(m, held, buffer, pool);
    return Status();
  };
  return weights;
}

}  // namespace marlin
