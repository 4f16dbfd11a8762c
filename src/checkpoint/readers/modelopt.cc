// NVIDIA ModelOpt. The types and shapes of X.weight and X.weight_scale tell the formats apart:
//   u8 [n, k / 2], f8_e4m3 [n, k / 16] and X.weight_scale_2    NVFP4; the last one multiplies
//   u8 [n, k / 2], u8 [n, k / 32]                              MXFP4
//   f8_e4m3 [n, k]; one number, [n], [n, k / 32] of u8, or blocks of 128 x 128    FP8, MXFP8
//   u8 [n / 2, k], floats [n, groups]     int4, two output features a byte, two's complement
// AWQ adds X.pre_quant_scale [k], by which the inputs of the product are multiplied.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/module_names.h"
#include "layout/parameters.h"

namespace marlin {
namespace {

constexpr int64_t kBlock = 128;
/// Scales of the inputs, which AWQ leaves where no norm could take them.
constexpr std::string_view kInputScale = ".pre_quant_scale";

class ModelOptFinder {
 public:
  ModelOptFinder(const TensorStore& store, const std::string& base) : finder_(store, base) {}

  Status AddTo(ListedReader* reader) {
    for (const char* factors :
         {".weight_quantizer._svdquant_lora_a", ".weight_quantizer.svdquant_lora_a"}) {
      if (!finder_.Has(factors)) continue;
      return finder_.Unsupported(std::string(factors + 1) +
                                 " adds a product of two matrices, which no format holds");
    }
    finder_.TakeUnused({".input_scale", ".k_scale", ".v_scale", ".output_scale"});
    const TensorInfo* weight = finder_.Look(".weight");
    const TensorInfo* scale = finder_.Look(".weight_scale");
    if (weight == nullptr) return finder_.Malformed(".weight", "is missing");
    if (weight->dtype != DType::kU8) {
      if (finder_.Has(kInputScale)) {
        return finder_.Unsupported(
            fmt::format("{} beside weights of {}; supported beside 4-bit weights",
                        std::string(kInputScale.substr(1)), DTypeName(weight->dtype)));
      }
      const int64_t block = scale->shape.rank() == 4 ? kBlock : 0;
      return AddFp8(finder_.base() + ".weight", ".weight", ".weight_scale", block, block, &finder_,
                    reader);
    }
    if (scale->dtype == DType::kF8E4M3) return AddFp4(16, ScaleType::kE4M3, reader);
    if (scale->dtype == DType::kU8) return AddFp4(32, ScaleType::kE8M0, reader);
    return AddInt4(reader);
  }

 private:
  /// Adds rows, with the scales of their inputs where AWQ left some.
  Status AddWithInputs(const std::string& name, RowWeights rows, ListedReader* reader) {
    if (!finder_.Has(kInputScale)) {
      AddRows(name, std::move(rows), &finder_, reader);
      return {};
    }
    MARLIN_ASSIGN_OR_RETURN(const size_t tensor,
                            finder_.Need(ModulePart::kInputScale, kInputScale, kFloatTypes));
    const int64_t count = finder_.ShapeOf(tensor).ElementCount();
    WeightsSpec& spec = rows.spec;
    if (count != spec.k && count != spec.experts * spec.k) {
      return finder_.Malformed(
          kInputScale, fmt::format("expected {} numbers, one for each input, got {}", spec.k,
                                   finder_.ShapeOf(tensor).ToString()));
    }
    spec.has_input_scale = true;
    for (int64_t i = 0; i < spec.experts * spec.k; ++i) {
      const float scale = ParameterAt(finder_.Data(tensor), finder_.TypeOf(tensor), i % count);
      if (!std::isfinite(scale)) {
        return finder_.Malformed(kInputScale, fmt::format("value {} is NaN or Inf", i % count));
      }
      rows.input_scale.push_back(scale);
    }
    AddRows(name, std::move(rows), &finder_, reader);
    return {};
  }

  Status AddFp4(int64_t group, ScaleType scale_type, ListedReader* reader) {
    MARLIN_ASSIGN_OR_RETURN(const size_t codes,
                            finder_.Need(ModulePart::kCodes, ".weight", {DType::kU8}));
    const Shape& shape = finder_.ShapeOf(codes);
    const int last = shape.rank() - 1;
    if (last < 1 || last > 2 || shape.ElementCount() < 1 || shape[last] % (group / 2) != 0) {
      return finder_.Malformed(
          ".weight", fmt::format("expected [n, k / 2] with k a multiple of {}, got {}", group,
                                 shape.ToString()));
    }
    Shape scales = shape;
    scales[last] = shape[last] / (group / 2);
    RowWeights rows;
    rows.codes = codes;
    MARLIN_ASSIGN_OR_RETURN(rows.scales, finder_.Need(ModulePart::kScales, ".weight_scale",
                                                      {DType::kF8E4M3, DType::kU8}, scales));
    rows.spec = {.format = Format::kFp4E2M1,
                 .experts = last == 2 ? shape[0] : 1,
                 .k = shape[last] * 2,
                 .n = shape[last - 1],
                 .group_size = group,
                 .scale_type = scale_type,
                 .has_global_scale = scale_type == ScaleType::kE4M3};
    if (rows.spec.has_global_scale) {
      MARLIN_ASSIGN_OR_RETURN(const size_t global, finder_.Need(ModulePart::kGlobalScale,
                                                                ".weight_scale_2", {DType::kF32}));
      const int64_t count = finder_.ShapeOf(global).ElementCount();
      if (count != 1 && count != rows.spec.experts) {
        return finder_.Malformed(".weight_scale_2",
                                 fmt::format("expected {} numbers, got {}", rows.spec.experts,
                                             finder_.ShapeOf(global).ToString()));
      }
      for (int64_t e = 0; e < rows.spec.experts; ++e) {
        rows.global_scale.push_back(
            ParameterAt(finder_.Data(global), DType::kF32, count == 1 ? 0 : e));
      }
    }
    return AddWithInputs(PlainWeightName(Producer::kHuggingFace, finder_.base(), last == 2),
                         std::move(rows), reader);
  }

  Status AddInt4(ListedReader* reader) {
    MARLIN_ASSIGN_OR_RETURN(const size_t codes,
                            finder_.Need(ModulePart::kCodes, ".weight", {DType::kU8}));
    RowWeights rows;
    MARLIN_ASSIGN_OR_RETURN(rows.scales,
                            finder_.Need(ModulePart::kScales, ".weight_scale", kFloatTypes));
    const Shape& shape = finder_.ShapeOf(codes);
    const Shape& scales = finder_.ShapeOf(*rows.scales);
    const bool matrices = shape.rank() == 2 && scales.rank() == 2 && shape.ElementCount() > 0;
    const std::optional<int64_t> n =
        matrices ? (Checked(shape[0]) * Checked(2)).Take() : std::nullopt;
    const std::optional<int64_t> group = n ? GroupSizeOf(shape[1], scales[1]) : std::nullopt;
    if (!group || scales[0] != *n) {
      return finder_.Malformed(".weight_scale", fmt::format("{} does not fit [n / 2, k] = {}",
                                                            scales.ToString(), shape.ToString()));
    }
    rows.codes = codes;
    rows.spec = {.format = Format::kS4,
                 .k = shape[1],
                 .n = *n,
                 .group_size = *group,
                 .scale_type = *ScaleTypeOf(finder_.TypeOf(*rows.scales))};
    rows.unpack = [data = finder_.Data(codes), k = shape[1]](int64_t row, uint8_t* out) {
      const std::byte* bytes = data + row / 2 * k;
      for (int64_t i = 0; i < k; ++i) {
        const auto byte = static_cast<uint8_t>(bytes[i]);
        out[i] = static_cast<uint8_t>((row % 2 == 0 ? byte & 15u : byte >> 4) ^ 8u);
      }
    };
    return AddWithInputs(finder_.base() + ".weight", std::move(rows), reader);
  }

  ModuleTensorFinder finder_;
};

}  // namespace

OpenReader OpenModelOpt;

Result<std::unique_ptr<const ModuleReader>> OpenModelOpt(TensorStore& store,
                                                         const QuantMethod& /*method*/) {
  return ListedReader::Open(store, [&](ListedReader* reader) -> Status {
    for (const std::string& base : BasesWithSuffix(store, ".weight_scale")) {
      MARLIN_RETURN_IF_ERROR(ModelOptFinder(store, base).AddTo(reader));
    }
    return {};
  });
}

}  // namespace marlin
