#include <fmt/core.h>

#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/listed_reader.h"
#include "checkpoint/readers/onnx/onnx_weights.h"

namespace marlin {
namespace {

/// Inputs of a node by their number.
struct MatrixInputs {
  const char* name;
  size_t codes;
  size_t scales;
  size_t zeros;
};
constexpr std::array<MatrixInputs, 3> kMatrices = {{
    {"fc1", 2, 3, 11},
    {"fc2", 5, 6, 12},
    {"fc3", 8, 9, 13},
}};
/// Global scales and scales of activations, which integers and blocks of fp8 do not have.
constexpr size_t kFirstOtherScale = 15;
constexpr size_t kInputs = 21;

/// One of the matrices [experts, n, k] of a QMoE node.
struct OnnxExperts {
  const OnnxSource* codes = nullptr;
  const OnnxSource* scales = nullptr;
  const OnnxSource* zeros = nullptr;  ///< Null: none.
  bool zeros_along_n = false;  ///< Without blocks zeros are packed along n, otherwise along k.
  int64_t block_rows = 1;      ///< Rows that share a scale.
  WeightsSpec spec;

  int64_t ZeroRows() const { return zeros_along_n ? spec.experts : spec.experts * spec.n; }
  int64_t ZerosInRow() const { return zeros_along_n ? spec.n : GroupCount(spec); }
  /// Zero `index` of a row, a code of `bits` bits.
  int Zero(int64_t row, int64_t index, int bits) const {
    const Shape& shape = zeros->tensor.shape;
    const std::byte* const bytes = zeros->data + row * shape[shape.rank() - 1];
    int code = 0;
    for (int i = 0; i < bits; ++i) {
      const int64_t bit = index * bits + i;
      code |= (static_cast<int>(bytes[bit / 8]) >> (bit % 8) & 1) << i;
    }
    return code;
  }
};

/// Reads the matrices of one node.
class ExpertsFinder {
 public:
  ExpertsFinder(const OnnxNode& node, FindOnnxSource find) : node_(node), find_(find) {}

  Result<std::vector<OnnxExperts>> Find() {
    MARLIN_RETURN_IF_ERROR(CheckAttributes());
    std::vector<OnnxExperts> matrices;
    for (const MatrixInputs& inputs : kMatrices) {
      if (node_.Input(inputs.codes).empty() && &inputs == &kMatrices[2]) continue;
      MARLIN_ASSIGN_OR_RETURN(const OnnxExperts matrix, FindMatrix(inputs));
      matrices.push_back(matrix);
    }
    MARLIN_RETURN_IF_ERROR(CheckShapes(matrices));
    return matrices;
  }

 private:
  Status CheckAttributes() {
    const std::string_view type = node_.quant_type.empty() ? "int" : node_.quant_type;
    fp8_ = type == "fp8";
    block_ = node_.Integer("block_size", 0);
    if (type != "int" && !fp8_) {
      return UnsupportedNode(
          fmt::format("quant_type \"{}\" is not supported; supported: int, fp8", Printable(type)));
    }
    if (fp8_ && block_ < 1) return UnsupportedNode("fp8 without block_size is not supported");
    const bool whole = !fp8_ && block_ < 1;
    if (!whole && (block_ < 16 || block_ > INT32_MAX ||
                   !std::has_single_bit(static_cast<uint64_t>(block_)))) {
      return MalformedNode(fmt::format("block_size={} is no power of two of at least 16", block_));
    }
    if (whole) block_ = 0;
    const int64_t prepacked = node_.Integer("weights_prepacked", -1);
    if (!fp8_ && prepacked != 0) {
      return UnsupportedNode(fmt::format(
          "weights_prepacked={}, which leaves the layout to the device, is not supported: 0 is",
          prepacked));
    }
    fusion_ = node_.Integer("swiglu_fusion", 0);
    if (fusion_ < 0 || fusion_ > 2) return MalformedNode(fmt::format("swiglu_fusion={}", fusion_));
    for (size_t i = kFirstOtherScale; i < kInputs; ++i) {
      if (!node_.Input(i).empty()) {
        return UnsupportedNode(
            fmt::format("global scales and scales of activations (\"{}\") are not "
                        "supported",
                        Printable(node_.Input(i))));
      }
    }
    return {};
  }

  Result<OnnxExperts> FindMatrix(const MatrixInputs& inputs) const {
    OnnxExperts m;
    m.codes = find_(node_.Input(inputs.codes));
    m.scales = find_(node_.Input(inputs.scales));
    m.zeros = find_(node_.Input(inputs.zeros));
    if (m.codes == nullptr || m.scales == nullptr ||
        (m.zeros == nullptr && !node_.Input(inputs.zeros).empty())) {
      return UnsupportedNode(
          fmt::format("codes, scales or zeros of {} are no initializers", inputs.name));
    }
    const int64_t shared = node_.Integer("expert_weight_bits", 4);
    const int64_t bits =
        fp8_ ? 8 : node_.Integer(fmt::format("{}_expert_weight_bits", inputs.name), shared);
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8) {
      return UnsupportedNode(
          fmt::format("{}: {} bits are not supported; supported: 2, 3, 4, 8", inputs.name, bits));
    }
    MARLIN_RETURN_IF_ERROR(SetSpec(inputs.name, bits, &m));
    return m;
  }

  Status SetSpec(const char* name, int64_t bits, OnnxExperts* m) const {
    const Shape& shape = m->codes->tensor.shape;
    const bool stack = shape.rank() == 3 && shape.ElementCount() > 0;
    const std::optional<int64_t> row_bits =
        stack ? (Checked(shape[2]) * Checked(8)).Take() : std::nullopt;
    const OnnxType type = fp8_ ? OnnxType::kF8E4M3 : OnnxType::kU8;
    if (m->codes->tensor.type != type || !row_bits || *row_bits % bits != 0) {
      return MalformedNode(fmt::format("{}: {} is not [experts, n, k] of {} bits", name,
                                       DescribeOnnxSource(*m->codes), bits));
    }
    WeightsSpec& spec = m->spec;
    spec = {.experts = shape[0], .k = *row_bits / bits, .n = shape[1]};
    spec.group_size = block_ == 0 ? spec.k : std::min(block_, spec.k);
    if (!fp8_ && block_ != 0 && spec.k % block_ != 0) {
      return MalformedNode(
          fmt::format("{}: block_size={} does not divide k={}", name, block_, spec.k));
    }
    MARLIN_RETURN_IF_ERROR(CheckScales(name, m));
    MARLIN_RETURN_IF_ERROR(CheckZeros(name, bits, m));
    spec.format =
        fp8_ ? Format::kFp8E4M3 : IntegerFormat(static_cast<int>(bits), m->zeros != nullptr);
    spec.has_zeros = m->zeros != nullptr && bits != 3;
    return {};
  }

  Status CheckScales(const char* name, OnnxExperts* m) const {
    WeightsSpec& spec = m->spec;
    const std::optional<DType> dtype = OnnxDType(m->scales->tensor.type);
    const std::optional<ScaleType> type = dtype ? ScaleTypeOf(*dtype) : std::nullopt;
    Shape expected{spec.experts, spec.n};
    if (fp8_) {
      m->block_rows = block_;
      expected = {spec.experts, CeilDivide(spec.n, block_), CeilDivide(spec.k, block_)};
    } else if (block_ != 0) {
      expected.Append(spec.k / block_);
    }
    if (!type || m->scales->tensor.shape != expected) {
      return MalformedNode(fmt::format("{}: scales {}, expected floats {}", name,
                                       DescribeOnnxSource(*m->scales), expected.ToString()));
    }
    spec.scale_type = *type;
    return {};
  }

  Status CheckZeros(const char* name, int64_t bits, OnnxExperts* m) const {
    if (m->zeros == nullptr) return {};
    if (fp8_) return MalformedNode(fmt::format("{}: fp8 has no zeros", name));
    const WeightsSpec& spec = m->spec;
    m->zeros_along_n = block_ == 0;
    Shape expected{spec.experts};
    if (!m->zeros_along_n) expected.Append(spec.n);
    expected.Append(CeilDivide((m->zeros_along_n ? spec.n : spec.k / block_) * bits, 8));
    if (m->zeros->tensor.type != OnnxType::kU8 || m->zeros->tensor.shape != expected) {
      return MalformedNode(fmt::format("{}: zeros {}, expected UINT8 {}", name,
                                       DescribeOnnxSource(*m->zeros), expected.ToString()));
    }
    // The operator defines no other zeros for 3 bits.
    for (int64_t row = 0; bits == 3 && row < m->ZeroRows(); ++row) {
      for (int64_t i = 0; i < m->ZerosInRow(); ++i) {
        if (m->Zero(row, i, 3) == 4) continue;
        return MalformedNode(fmt::format("{}: zero {} at [{}, {}], 3 bits have only 4", name,
                                         m->Zero(row, i, 3), row, i));
      }
    }
    return {};
  }

  /// fc1 [rows * I, H], fc2 [H, I], fc3 [I, H], of as many experts each.
  Status CheckShapes(const std::vector<OnnxExperts>& matrices) const {
    const WeightsSpec& up = matrices[0].spec;
    const WeightsSpec& down = matrices[1].spec;
    const int64_t rows = fusion_ == 0 ? 1 : 2;
    const auto fits = [&](const WeightsSpec& spec, int64_t n, int64_t k) {
      return spec.experts == up.experts && spec.n == n && spec.k == k;
    };
    bool all = fits(up, rows * down.k, down.n) && fits(down, down.n, down.k);
    if (matrices.size() == 3) {
      if (fusion_ != 0) return MalformedNode("fc3 beside an fc1 that is fused with it");
      all = all && fits(matrices[2].spec, down.k, down.n);
    }
    if (all) return {};
    return MalformedNode(
        fmt::format("fc1 [{}, {}, {}] does not fit fc2 [{}, {}, {}] with "
                    "swiglu_fusion={}",
                    up.experts, up.n, up.k, down.experts, down.n, down.k, fusion_));
  }

  const OnnxNode& node_;
  FindOnnxSource find_;
  bool fp8_ = false;
  int64_t block_ = 0;  // 0: one scale for each row.
  int64_t fusion_ = 0;
};

void FillExperts(const OnnxExperts& m, WeightsBuffer* buffer, ThreadPool& pool) {
  const WeightsSpec& spec = m.spec;
  const uint32_t flip = spec.format == Format::kS8 ? 0x80808080u : 0;
  PackDenseRows({m.codes->data, m.codes->tensor.shape[2], flip, false}, *buffer, pool);
  StoreScales(m.scales->data, m.block_rows, *buffer);
  if (!spec.has_zeros) return;
  const int bits = GetFormatInfo(spec.format).bits;
  // Zeros of u4 and u8 are codes, zeros of formats around 0 count from the middle.
  const int middle = bits < 4 ? 1 << (bits - 1) : 0;
  StoreZeros(
      [&](int64_t row, int64_t group) {
        return (m.zeros_along_n ? m.Zero(row / spec.n, row % spec.n, bits)
                                : m.Zero(row, group, bits)) -
               middle;
      },
      *buffer);
}

}  // namespace

Result<std::vector<OnnxWeights>> ReadOnnxExperts(const OnnxNode& node, FindOnnxSource find,
                                                 const OnnxUses& /*uses*/) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<OnnxExperts> matrices,
                          ExpertsFinder(node, find).Find());
  std::vector<OnnxWeights> weights;
  for (const OnnxExperts& m : matrices) {
    if (m.codes->scales == m.scales) continue;
    const auto fill = [m](WeightsBuffer* buffer, ThreadPool& pool) {
      FillExperts(m, buffer, pool);
      return Status();
    };
    weights.push_back({.codes = m.codes,
                       .scales = m.scales,
                       .zeros = m.zeros,
                       .spec = m.spec,
                       .stacked = true,
                       .fill = fill});
  }
  return weights;
}

}  // namespace marlin
