// bitsandbytes. NF4 and FP4: X.weight holds two codes a byte, the high nibble first, of the
// flattened matrix; blocks of codes share a scale, X.weight.absmax f32, or u8 through the table
// X.weight.nested_quant_map with X.weight.nested_absmax and an offset. X.weight.quant_map is the
// table of values, and X.weight.quant_state.bitsandbytes__nf4 (or fp4) holds JSON. int8: X.weight
// i8 [n, k] and X.SCB f32 [n]: weight = code * SCB / 127.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/module_names.h"
#include "layout/parameters.h"
#include "recipe/model_config.h"

namespace marlin {
namespace {

constexpr JsonLimits kStateJson{int64_t{64} << 10, 1 << 10};
constexpr std::array<std::string_view, 2> kQuantTypes = {"nf4", "fp4"};

/// The scales of the blocks of one matrix, or of a stack.
struct BlockScales {
  int64_t block = 64;
  size_t absmax = 0;
  bool nested = false;
  int64_t nested_block = 256;
  float offset = 0;
  size_t nested_absmax = 0;
  size_t nested_map = 0;

  float At(const TensorStore& store, int64_t element) const {
    const int64_t index = element / block;
    if (!nested) return ParameterAt(store.Data(absmax), DType::kF32, index);
    const auto code = static_cast<uint8_t>(store.Data(absmax)[index]);
    // In two steps, as the package rounds.
    const float product = ParameterAt(store.Data(nested_map), DType::kF32, code) *
                          ParameterAt(store.Data(nested_absmax), DType::kF32, index / nested_block);
    return product + offset;
  }
};

class FourBitFinder {
 public:
  FourBitFinder(const TensorStore& store, const std::string& base, std::string_view type)
      : store_(store), finder_(store, base), type_(type) {}

  Status AddTo(ListedReader* reader) {
    MARLIN_RETURN_IF_ERROR(ReadState());
    MARLIN_RETURN_IF_ERROR(FindTensors());
    // Blocks run along the flattened matrix: groups are the parts of blocks in one row.
    const int64_t group = std::gcd(k_, scales_.block);
    const std::string name = PlainWeightName(Producer::kHuggingFace, finder_.base(), stacked_);
    if (k_ % 2 != 0 || (group % kGroupGranule != 0 && group < k_)) {
      AddFloats(name, experts_, k_, n_, FloatValues(), &finder_, reader);
      return {};
    }
    AddRows(name, Rows(group), &finder_, reader);
    return {};
  }

 private:
  RowWeights Rows(int64_t group) const {
    RowWeights rows;
    rows.codes = codes_;
    rows.swap_nibbles = true;
    rows.spec = {.format = type_ == "nf4" ? Format::kNf4 : Format::kCodebook4,
                 .experts = experts_,
                 .k = k_,
                 .n = n_,
                 .group_size = group,
                 .scale_type = ScaleType::kF32};
    const std::vector<float> table = Table();
    const std::span<const float> built_in = FormatValues(rows.spec.format);
    if (!std::equal(table.begin(), table.end(), built_in.begin())) rows.codebook = table;
    rows.more = [scales = scales_, &store = store_](WeightsBuffer* buffer) {
      FillScales(store, scales, buffer);
    };
    return rows;
  }

  static void FillScales(const TensorStore& store, const BlockScales& scales,
                         WeightsBuffer* buffer) {
    const WeightsSpec& spec = buffer->weights.spec;
    auto* out = static_cast<float*>(buffer->scales);
    for (int64_t e = 0; e < spec.experts; ++e) {
      for (int64_t g = 0; g < GroupCount(spec); ++g) {
        for (int64_t n = 0; n < spec.n; ++n) {
          *out++ = scales.At(store, (e * spec.n + n) * spec.k + g * spec.group_size);
        }
      }
    }
  }

  std::string StateSuffix() const {
    return ".weight.quant_state.bitsandbytes__" + std::string(type_);
  }

  Status ReadState() {
    MARLIN_ASSIGN_OR_RETURN(const size_t state,
                            finder_.Need(ModulePart::kCodebook, StateSuffix(), {DType::kU8}));
    const TensorInfo& info = store_.tensors[state];
    const std::string_view text(reinterpret_cast<const char*>(store_.Data(state)),
                                static_cast<size_t>(info.bytes));
    const std::string where =
        fmt::format("{}: tensor \"{}\"", Printable(store_.path), Printable(info.name));
    MARLIN_ASSIGN_OR_RETURN(ModelConfig json, ModelConfig::Parse(text, where, kStateJson));
    scales_.block = json.Size("blocksize", int64_t{1} << 20);
    scales_.nested = json.Has("nested_blocksize");
    scales_.nested_block = json.SizeOr("nested_blocksize", int64_t{1} << 20, 256);
    scales_.offset = static_cast<float>(json.RealOr("nested_offset", -1e30, 1e30, 0));
    const std::string type = json.String("quant_type");
    const std::vector<int64_t> shape = json.IntegersOrEmpty("shape");
    MARLIN_RETURN_IF_ERROR(json.status());
    Checked count(1);
    for (const int64_t dim : shape) count = count * Checked(dim);
    if (type != type_ || shape.size() < 2 || shape.size() > 3 || count.Take().value_or(0) < 1) {
      return finder_.Malformed(StateSuffix(),
                               fmt::format("quant_type \"{}\" with a shape of {} dimensions",
                                           Printable(type), shape.size()));
    }
    stacked_ = shape.size() == 3;
    experts_ = stacked_ ? shape[0] : 1;
    n_ = shape[shape.size() - 2];
    k_ = shape[shape.size() - 1];
    return {};
  }

  Status FindTensors() {
    const int64_t count = experts_ * n_ * k_;
    const int64_t blocks = CeilDivide(count, scales_.block);
    // FSDP stores the same bytes under other types.
    MARLIN_ASSIGN_OR_RETURN(
        codes_, finder_.Need(ModulePart::kCodes, ".weight",
                             {DType::kU8, DType::kI8, DType::kBf16, DType::kF16, DType::kF32}));
    const int64_t bytes = store_.tensors[codes_].bytes;
    if (bytes < CeilDivide(count, 2) || bytes > CeilDivide(count, 2) + 3) {
      return finder_.Malformed(
          ".weight", fmt::format("{} bytes do not hold {} codes of 4 bits", bytes, count));
    }
    MARLIN_ASSIGN_OR_RETURN(
        table_, finder_.Need(ModulePart::kCodebook, ".weight.quant_map", {DType::kF32}, {16}));
    const DType scale_type = scales_.nested ? DType::kU8 : DType::kF32;
    MARLIN_ASSIGN_OR_RETURN(scales_.absmax, finder_.Need(ModulePart::kScales, ".weight.absmax",
                                                         {scale_type}, {blocks}));
    if (!scales_.nested) return {};
    MARLIN_ASSIGN_OR_RETURN(
        scales_.nested_absmax,
        finder_.Need(ModulePart::kScales, ".weight.nested_absmax", {DType::kF32},
                     {CeilDivide(blocks, scales_.nested_block)}));
    MARLIN_ASSIGN_OR_RETURN(
        scales_.nested_map,
        finder_.Need(ModulePart::kScales, ".weight.nested_quant_map", {DType::kF32}, {256}));
    return {};
  }

  std::vector<float> Table() const {
    std::vector<float> table(16);
    std::memcpy(table.data(), store_.Data(table_), table.size() * sizeof(float));
    return table;
  }

  ValueOfRow FloatValues() const {
    return [codes = store_.Data(codes_), scales = scales_, &store = store_, table = Table(),
            k = k_](int64_t row, float* values) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t element = row * k + i;
        const auto byte = static_cast<uint8_t>(codes[element / 2]);
        const size_t code = element % 2 == 0 ? byte >> 4 : byte & 15u;
        values[i] = table[code] * scales.At(store, element);
      }
    };
  }

  const TensorStore& store_;
  ModuleTensorFinder finder_;
  std::string_view type_;
  int64_t experts_ = 1;
  int64_t n_ = 0;
  int64_t k_ = 0;
  bool stacked_ = false;
  size_t codes_ = 0;
  size_t table_ = 0;
  BlockScales scales_;
};

Status AddInt8(const TensorStore& store, const std::string& base, ListedReader* reader) {
  constexpr float kStep = 1.0f / 127.0f;
  ModuleTensorFinder finder(store, base);
  MARLIN_ASSIGN_OR_RETURN(const size_t codes,
                          finder.Need(ModulePart::kCodes, ".weight", {DType::kI8}));
  const Shape& shape = finder.ShapeOf(codes);
  if (shape.rank() != 2 || shape.ElementCount() < 1) {
    return finder.Malformed(".weight", "expected [n, k], got " + shape.ToString());
  }
  MARLIN_ASSIGN_OR_RETURN(const size_t scales,
                          finder.Need(ModulePart::kScales, ".SCB", {DType::kF32}, {shape[0]}));
  finder.TakeUnused({".weight_format"});
  if (const TensorInfo* order = finder.Look(".weight_format"); order != nullptr) {
    const std::byte* data = store.Data(*store.FindTensor(order->name));
    if (order->bytes > 0 && data[0] != std::byte{0}) {
      return finder.Unsupported(fmt::format("weight_format {} is not supported: expected 0, rows",
                                            static_cast<int>(data[0])));
    }
  }
  RowWeights rows;
  rows.codes = codes;
  // The package multiplies code and SCB first and rounds twice.
  rows.exactness = Exactness::kLastBit;
  rows.spec = {.format = Format::kS8,
               .k = shape[1],
               .n = shape[0],
               .group_size = shape[1],
               .scale_type = ScaleType::kF32};
  rows.more = [from = store.Data(scales), n = shape[0]](WeightsBuffer* buffer) {
    for (int64_t i = 0; i < n; ++i) {
      static_cast<float*>(buffer->scales)[i] = ParameterAt(from, DType::kF32, i) * kStep;
    }
  };
  AddRows(base + ".weight", std::move(rows), &finder, reader);
  return {};
}

Status AddModules(TensorStore& store, ListedReader* reader) {
  for (const std::string_view type : kQuantTypes) {
    const std::string suffix = ".weight.quant_state.bitsandbytes__" + std::string(type);
    for (const std::string& base : BasesWithSuffix(store, suffix)) {
      MARLIN_RETURN_IF_ERROR(FourBitFinder(store, base, type).AddTo(reader));
    }
  }
  for (const std::string& base : BasesWithSuffix(store, ".SCB")) {
    MARLIN_RETURN_IF_ERROR(AddInt8(store, base, reader));
  }
  return {};
}

}  // namespace

OpenReader OpenBitsandbytes;

Result<std::unique_ptr<const ModuleReader>> OpenBitsandbytes(TensorStore& store,
                                                             const QuantMethod& /*method*/) {
  return ListedReader::Open(store, [&](ListedReader* reader) { return AddModules(store, reader); });
}

}  // namespace marlin
