// HQQ, as HQQLinear writes its state. The matrix X [n, k] is reshaped to [n * k / g, g] with one
// scale and zero a row (axis 1), or to [g, n * k / g] with one a column (axis 0). X.W_q packs codes
// of rows that lie 1/8, 1/4, 1/2 (u8) or 1/10 (i32, 3 bits) of all rows apart, the first row in the
// highest bits. X.nbits, X.group_size, X.axis and X.shape are tensors too.
// weight = (code - zero) * scale, rounded twice in fp32.
#include <fmt/core.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/codes/unpack.h"
#include "layout/parameters.h"

namespace marlin {
namespace {

struct HqqModule {
  int bits = 4;       // Bits that a stored code takes.
  int code_bits = 4;  // Bits that it uses.
  int64_t group_size = 64;
  int64_t axis = 1;
  int64_t n = 0;
  int64_t k = 0;
  int64_t columns = 0;      // In a row of the reshaped matrix.
  int64_t packed_rows = 0;  // Rows of W_q.
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  const std::byte* zeros = nullptr;
  DType scale_type = DType::kF32;
  DType zero_type = DType::kF32;

  int PerElement() const { return bits == 3 ? 10 : 8 / bits; }

  int CodeAt(int64_t element) const {
    const int64_t row = element / columns;
    const int64_t packed = row % packed_rows * columns + element % columns;
    const auto shift = static_cast<int>((PerElement() - 1 - row / packed_rows) * bits);
    const uint32_t word = bits == 3 ? WordAt(codes, packed) : static_cast<uint32_t>(codes[packed]);
    return static_cast<int>((word >> shift) & ((1u << bits) - 1));
  }
  int64_t GroupAt(int64_t element) const {
    return axis == 1 ? element / columns : element % columns;
  }
};

class HqqFinder {
 public:
  HqqFinder(const TensorStore& store, const std::string& base) : finder_(store, base) {}

  Status AddTo(ListedReader* reader) {
    finder_.TakeUnused({".nbits", ".group_size", ".axis", ".shape", ".packing", ".view_as_float",
                        ".unpack_view_dtype", ".compute_dtype", ".quant_scale", ".quant_zero",
                        ".offload_meta", ".encoded_state_dict", ".stores_quant_config",
                        ".channel_wise", ".optimize", ".round_zero"});
    MARLIN_RETURN_IF_ERROR(ReadDescription());
    MARLIN_RETURN_IF_ERROR(FindTensors());
    const std::string name = finder_.base() + ".weight";
    const bool grouped = m_.axis == 1 && m_.k % m_.group_size == 0 &&
                         (m_.group_size % kGroupGranule == 0 || m_.group_size == m_.k);
    if (grouped) {
      AddGrouped(name, reader);
      return {};
    }
    AddFloats(
        name, 1, m_.k, m_.n,
        [m = m_](int64_t row, float* values) {
          for (int64_t i = 0; i < m.k; ++i) {
            const int64_t element = row * m.k + i;
            const int64_t group = m.GroupAt(element);
            const float centered =
                static_cast<float>(m.CodeAt(element)) - ParameterAt(m.zeros, m.zero_type, group);
            values[i] = centered * ParameterAt(m.scales, m.scale_type, group);
          }
        },
        &finder_, reader);
    return {};
  }

 private:
  /// A number that a tensor of one element holds.
  Result<int64_t> Number(std::string_view suffix, int64_t min, int64_t max) const {
    const TensorInfo* tensor = finder_.Look(suffix);
    if (tensor == nullptr) {
      return finder_.Malformed(suffix, "is missing: X.W_q is described by tensors beside it");
    }
    const std::byte* data = finder_.Data(*finder_.store().FindTensor(tensor->name));
    double value = std::numeric_limits<double>::quiet_NaN();
    if (tensor->shape.ElementCount() == 1) {
      if (tensor->dtype == DType::kI32) value = static_cast<int32_t>(WordAt(data, 0));
      if (tensor->dtype == DType::kF32)
        value = static_cast<double>(ParameterAt(data, DType::kF32, 0));
      if (tensor->dtype == DType::kU8) value = static_cast<uint8_t>(data[0]);
      if (tensor->dtype == DType::kI64) {
        value = static_cast<double>(
            static_cast<int64_t>(uint64_t{WordAt(data, 0)} | uint64_t{WordAt(data, 1)} << 32));
      }
    }
    if (!(value >= static_cast<double>(min) && value <= static_cast<double>(max))) {
      return finder_.Malformed(suffix, fmt::format("expected a number in {}..{}, got {} of type {}",
                                                   min, max, value, DTypeName(tensor->dtype)));
    }
    return static_cast<int64_t>(std::ceil(value));  // 1.58 bits are stored as 2.
  }

  Status ReadDescription() {
    MARLIN_ASSIGN_OR_RETURN(const int64_t bits, Number(".nbits", 1, 8));
    MARLIN_ASSIGN_OR_RETURN(m_.axis, Number(".axis", 0, 1));
    MARLIN_ASSIGN_OR_RETURN(m_.group_size, Number(".group_size", 1, INT32_MAX));
    // Five to seven bits are stored one a byte.
    m_.bits = bits > 4 ? 8 : static_cast<int>(bits);
    m_.code_bits = static_cast<int>(bits);
    if (finder_.Has(".view_as_float")) {
      MARLIN_ASSIGN_OR_RETURN(const int64_t as_float, Number(".view_as_float", 0, 1));
      if (as_float != 0) return finder_.Unsupported("view_as_float is not supported");
    }
    const TensorInfo* shape = finder_.Look(".shape");
    if (shape == nullptr || shape->dtype != DType::kI64 || !(shape->shape == Shape{2})) {
      return finder_.Malformed(".shape", "expected i64 [2]");
    }
    const std::byte* data = finder_.Data(*finder_.store().FindTensor(shape->name));
    const bool small = WordAt(data, 1) == 0 && WordAt(data, 3) == 0;
    m_.n = small ? WordAt(data, 0) : 0;
    m_.k = small ? WordAt(data, 2) : 0;
    if (m_.n < 1 || m_.k < 1 || m_.n > INT32_MAX || m_.k > INT32_MAX ||
        m_.n * m_.k % m_.group_size != 0) {
      return finder_.Malformed(
          ".shape", fmt::format("[{}, {}] does not fit groups of {}", m_.n, m_.k, m_.group_size));
    }
    return {};
  }

  Status FindTensors() {
    const int64_t groups = m_.n * m_.k / m_.group_size;
    const int64_t rows = m_.axis == 1 ? groups : m_.group_size;
    m_.columns = m_.axis == 1 ? m_.group_size : groups;
    m_.packed_rows = m_.bits == 3 ? CeilDivide(rows, 10) : rows / m_.PerElement();
    if (m_.bits != 3 && rows % m_.PerElement() != 0) {
      return finder_.Malformed(
          ".W_q", fmt::format("{} rows of codes of {} bits are not whole bytes", rows, m_.bits));
    }
    const DType code_type = m_.bits == 3 ? DType::kI32 : DType::kU8;
    MARLIN_ASSIGN_OR_RETURN(
        const size_t codes,
        finder_.Need(ModulePart::kCodes, ".W_q", {code_type}, {m_.packed_rows, m_.columns}));
    MARLIN_ASSIGN_OR_RETURN(const size_t scales,
                            finder_.Need(ModulePart::kScales, ".scale", kFloatTypes));
    MARLIN_ASSIGN_OR_RETURN(const size_t zeros,
                            finder_.Need(ModulePart::kZeros, ".zero", kFloatTypes));
    for (const size_t tensor : {scales, zeros}) {
      if (finder_.ShapeOf(tensor).ElementCount() == groups) continue;
      return finder_.Malformed(
          tensor == scales ? ".scale" : ".zero",
          fmt::format("expected {} numbers, got {}", groups, finder_.ShapeOf(tensor).ToString()));
    }
    m_.codes = finder_.Data(codes);
    m_.scales = finder_.Data(scales);
    m_.zeros = finder_.Data(zeros);
    m_.scale_type = finder_.TypeOf(scales);
    m_.zero_type = finder_.TypeOf(zeros);
    return {};
  }

  /// Whether the bytes are codes of as many bits as X.nbits says.
  static Status CheckCodes(const HqqModule& m) {
    for (int64_t i = 0; i < m.packed_rows * m.columns; ++i) {
      const auto code = static_cast<uint8_t>(m.codes[i]);
      if (code >> m.code_bits == 0) continue;
      return Status(Code::kMalformedFile,
                    fmt::format("codes: {} at [{}, {}] is no code of {} bits", code, i / m.columns,
                                i % m.columns, m.code_bits));
    }
    return {};
  }

  void AddGrouped(const std::string& name, ListedReader* reader) {
    RowWeights rows;
    rows.exactness = Exactness::kLastBit;
    // Zeros are fractions: formats whose values are centered would round them.
    // Codes of 1 to 3 bits are held in 4, of 7 bits in 8.
    rows.spec = {.format = IntegerFormat(std::max(m_.code_bits, 4), /*is_unsigned=*/true),
                 .k = m_.k,
                 .n = m_.n,
                 .group_size = m_.group_size,
                 .scale_type = *ScaleTypeOf(m_.scale_type),
                 .has_zeros = true,
                 .zero_type = *ScaleTypeOf(m_.zero_type)};
    if (GetFormatInfo(rows.spec.format).bits < m_.bits) {
      rows.check = [m = m_] { return CheckCodes(m); };
    }
    rows.unpack = [m = m_](int64_t row, uint8_t* codes) {
      for (int64_t i = 0; i < m.k; ++i) {
        codes[i] = static_cast<uint8_t>(m.CodeAt(row * m.k + i));
      }
    };
    rows.more = [m = m_](WeightsBuffer* buffer) {
      const int64_t groups = m.k / m.group_size;
      TransposeElements(m.scales, 1, m.n, groups, DTypeBytes(m.scale_type), buffer->scales);
      TransposeElements(m.zeros, 1, m.n, groups, DTypeBytes(m.zero_type), buffer->zeros);
    };
    AddRows(name, std::move(rows), &finder_, reader);
  }

  ModuleTensorFinder finder_;
  HqqModule m_;
};

}  // namespace

OpenReader OpenHqq;

Result<std::unique_ptr<const ModuleReader>> OpenHqq(TensorStore& store,
                                                    const QuantMethod& /*method*/) {
  return ListedReader::Open(store, [&](ListedReader* reader) -> Status {
    for (const std::string& base : BasesWithSuffix(store, ".W_q")) {
      MARLIN_RETURN_IF_ERROR(HqqFinder(store, base).AddTo(reader));
    }
    return {};
  });
}

}  // namespace marlin
