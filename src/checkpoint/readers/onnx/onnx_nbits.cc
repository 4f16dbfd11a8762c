// MatMulNBits: codes by output feature, with scales, and zeros of its own packing.
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
#include "layout/input_transform.h"
#include "layout/parameters.h"
#include "layout/permutation.h"

namespace marlin {
namespace {

struct NBits {
  const OnnxSource* codes = nullptr;
  const OnnxSource* scales = nullptr;
  const OnnxSource* zeros = nullptr;
  const OnnxSource* index = nullptr;  ///< The group of each k; null: groups are consecutive.
  bool regroups = false;              ///< Groups are not consecutive.
  std::vector<int32_t> permutation;   ///< Sorts k by `index`; empty: nothing does.
  int bits = 4;
  int64_t k = 0;
  int64_t n = 0;
  int64_t block = 0;
  int64_t blocks = 0;
  bool float_zeros = false;

  int64_t row_bytes() const { return blocks * block * bits / 8; }
  /// The group of weight k. A file that changes while it is read cannot lead past the groups.
  int64_t Group(int64_t at) const { return std::min<int64_t>(WordAt(index->data, at), blocks - 1); }
  int Zero(int64_t g, int64_t c) const {
    if (zeros == nullptr) return 1 << (bits - 1);
    const int64_t bytes = CeilDivide(blocks * bits, 8);
    const auto byte = static_cast<uint8_t>(zeros->data[c * bytes + g * bits / 8]);
    return byte >> (g * bits % 8) & ((1 << bits) - 1);
  }
};

/// g_idx: an int32 for each k, or for each k of whole blocks.
Status FindGroups(const OnnxNode& node, FindOnnxSource find, NBits* m) {
  if (node.Input(4).empty()) return {};
  const OnnxSource* const index = find(node.Input(4));
  if (index == nullptr) {
    return UnsupportedNode("its g_idx is no initializer");
  }
  const OnnxTensor& tensor = index->tensor;
  const int64_t count = index->count();
  if (tensor.type != OnnxType::kI32 || (count != m->k && count != m->blocks * m->block)) {
    return MalformedNode(fmt::format("g_idx \"{}\" {} {} does not fit K={}, block_size={}",
                                     Printable(tensor.name), OnnxTypeName(tensor.type),
                                     tensor.shape.ToString(), m->k, m->block));
  }
  bool consecutive = true;
  std::vector<int32_t> groups(static_cast<size_t>(m->k));
  for (int64_t k = 0; k < m->k; ++k) {
    const auto group = static_cast<int32_t>(WordAt(index->data, k));
    if (group < 0 || group >= m->blocks) {
      return MalformedNode(fmt::format("g_idx \"{}\": group {} of {} at [{}]",
                                       Printable(tensor.name), group, m->blocks, k));
    }
    consecutive = consecutive && group == k / m->block;
    groups[static_cast<size_t>(k)] = group;
  }
  m->index = index;
  m->regroups = !consecutive;
  if (m->regroups) m->permutation = SortByGroup(groups, m->block);
  return {};
}

Status CheckNBits(NBits* m) {
  const auto is_float = [](const OnnxSource& source) {
    return source.tensor.type == OnnxType::kF32 || source.tensor.type == OnnxType::kF16 ||
           source.tensor.type == OnnxType::kBf16;
  };
  const auto misfit = [&](const OnnxSource& source) {
    return MalformedNode(
        fmt::format("\"{}\" {} {} does not fit K={}, N={}, block_size={}, "
                    "bits={}",
                    Printable(source.tensor.name), OnnxTypeName(source.tensor.type),
                    source.tensor.shape.ToString(), m->k, m->n, m->block, m->bits));
  };
  if (m->codes->tensor.type != OnnxType::kU8 || m->codes->tensor.bytes != m->n * m->row_bytes()) {
    return misfit(*m->codes);
  }
  if (!is_float(*m->scales) || m->scales->count() != m->n * m->blocks) return misfit(*m->scales);
  if (m->zeros == nullptr) return {};
  m->float_zeros = is_float(*m->zeros);
  const int64_t packed = m->n * CeilDivide(m->blocks * m->bits, 8);
  const bool fits =
      m->float_zeros ? m->zeros->count() == m->n * m->blocks
                     : m->zeros->tensor.type == OnnxType::kU8 && m->zeros->tensor.bytes == packed;
  return fits ? Status() : misfit(*m->zeros);
}

/// The weights of output n, each with the scale of its own group.
void NBitsValues(const NBits& m, int64_t n, float* values) {
  const DType scale_type = *OnnxDType(m.scales->tensor.type);
  for (int64_t k = 0; k < m.k; ++k) {
    const int64_t group = m.Group(k);
    const int64_t bit = k * m.bits;
    const auto byte = static_cast<uint8_t>(m.codes->data[n * m.row_bytes() + bit / 8]);
    const auto code = static_cast<float>(byte >> (bit % 8) & ((1 << m.bits) - 1));
    const float zero = m.float_zeros ? ParameterAt(m.zeros->data, *OnnxDType(m.zeros->tensor.type),
                                                   n * m.blocks + group)
                                     : static_cast<float>(m.Zero(group, n));
    values[k] = (code - zero) * ParameterAt(m.scales->data, scale_type, n * m.blocks + group);
  }
}

Status FillNBits(const NBits& m, WeightsBuffer* buffer, ThreadPool& pool) {
  const WeightsSpec& spec = buffer->weights.spec;
  if (m.regroups && m.permutation.empty()) {
    StoreFloatRows([&m](int64_t n, float* values) { NBitsValues(m, n, values); }, *buffer, pool);
    return {};
  }
  const uint32_t flip = spec.format == Format::kS8 ? 0x80808080u : 0;
  PackDenseRows({m.codes->data, m.row_bytes(), flip, false}, *buffer, pool);
  StoreScales(m.scales->data, 1, *buffer);
  if (spec.has_permutation) MARLIN_RETURN_IF_ERROR(StoreSorted(m.permutation, buffer));
  if (!spec.has_zeros) return {};
  const int middle = spec.format == Format::kInt2 ? 2 : 0;
  if (!m.float_zeros) {
    StoreZeros([&](int64_t c, int64_t g) { return m.Zero(g, c) - middle; }, *buffer);
    return {};
  }
  const DType zero_type = *OnnxDType(m.zeros->tensor.type);
  auto* out = static_cast<float*>(buffer->zeros);
  for (int64_t g = 0; g < m.blocks; ++g) {
    for (int64_t c = 0; c < m.n; ++c) {
      *out++ = ParameterAt(m.zeros->data, zero_type, c * m.blocks + g) - static_cast<float>(middle);
    }
  }
  return {};
}

OnnxWeights NBitsWeights(const NBits& m) {
  WeightsSpec spec{.format = IntegerFormat(m.bits, m.zeros != nullptr),
                   .k = m.k,
                   .n = m.n,
                   .group_size = std::min(m.block, m.k),
                   .scale_type = *ScaleTypeOf(*OnnxDType(m.scales->tensor.type)),
                   .has_zeros = m.zeros != nullptr};
  if (m.float_zeros) spec.zero_type = ScaleType::kF32;
  spec.has_permutation = m.regroups;
  // Groups of unequal sizes have no format of their own.
  if (m.regroups && m.permutation.empty()) spec = FoldedSpec(spec);
  OnnxWeights weights{
      .codes = m.codes, .scales = m.scales, .zeros = m.zeros, .index = m.index, .spec = spec};
  // The runtime rounds the product of scale and zero before it subtracts it.
  if (m.float_zeros) weights.exactness = Exactness::kLastBit;
  weights.fill = [m](WeightsBuffer* buffer, ThreadPool& pool) {
    return FillNBits(m, buffer, pool);
  };
  return weights;
}

}  // namespace

Result<std::vector<OnnxWeights>> ReadOnnxNBits(const OnnxNode& node, FindOnnxSource find,
                                               const OnnxUses& /*uses*/) {
  NBits m;
  m.codes = find(node.Input(1));
  m.scales = find(node.Input(2));
  m.zeros = find(node.Input(3));
  if (m.codes != nullptr && m.codes->scales != nullptr && m.codes->scales == m.scales) {
    return std::vector<OnnxWeights>();
  }
  if (m.codes == nullptr || m.scales == nullptr || (m.zeros == nullptr && !node.Input(3).empty())) {
    return UnsupportedNode("its codes, scales or zeros are no initializers");
  }
  if (node.Integer("weight_prepacked", 0) != 0) {
    return UnsupportedNode("prepacked weights are not supported");
  }
  const int64_t bits = node.Integer("bits", 4);
  m.k = node.Integer("K", 0);
  m.n = node.Integer("N", 0);
  m.block = node.Integer("block_size", 0);
  if (bits != 2 && bits != 4 && bits != 8) {
    return UnsupportedNode(fmt::format("{} bits are not supported; supported: 2, 4, 8", bits));
  }
  const bool fits = m.k > 0 && m.n > 0 && m.k <= INT32_MAX && m.n <= INT32_MAX &&
                    m.block >= kGroupGranule && m.block <= INT32_MAX &&
                    m.block % kGroupGranule == 0;
  if (!fits) {
    return MalformedNode(fmt::format("K={}, N={}, block_size={}", m.k, m.n, m.block));
  }
  m.bits = static_cast<int>(bits);
  m.blocks = CeilDivide(m.k, m.block);
  MARLIN_RETURN_IF_ERROR(CheckNBits(&m));
  MARLIN_RETURN_IF_ERROR(FindGroups(node, find, &m));
  return std::vector<OnnxWeights>{NBitsWeights(m)};
}

}  // namespace marlin
