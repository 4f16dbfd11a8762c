// MLX: affine codes with scales and biases, and the FP4 and FP8 modes with exponents as scales.
// Codes of a row of the weight [n, k] are packed along k, the first lowest.
//
//   affine        X.weight u32 [n, k * bits / 32], X.scales and X.biases [n, groups]
//   mxfp4, mxfp8  X.weight u32 [n, k * bits / 32], X.scales u8 [n, groups]
//   nvfp4         X.weight u32 [n, k / 8], X.scales u8 [n, groups], e4m3. MLX's layers know no
//   global
//                 scale: it is multiplied into the scales where that is exact
//
// Experts are stacked, under the name of MLX's module for them.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/codes/foreign_codes.h"
#include "checkpoint/module_writer.h"
#include "checkpoint/writers/mlx_config.h"
#include "layout/parameters.h"
#include "recipe/decoder_tensors.h"
#include "recipe/expert_name.h"

namespace marlin {
namespace {

constexpr std::string_view kMlxName = "mlx";

bool IsNvfp4(const WeightsSpec& spec) {
  return spec.format == Format::kFp4E2M1 && spec.scale_type == ScaleType::kE4M3 &&
         spec.group_size == 16 && !spec.has_biases;
}

/// Codes and scales of fixed kinds, without biases.
bool IsMicroscaled(const WeightsSpec& spec) {
  const bool format = spec.format == Format::kFp4E2M1 || spec.format == Format::kFp8E4M3;
  return IsNvfp4(spec) || (format && spec.scale_type == ScaleType::kE8M0 && spec.group_size == 32 &&
                           !spec.has_biases);
}

std::string_view ModeOf(const WeightsSpec& spec) {
  if (IsNvfp4(spec)) return "nvfp4";
  if (!IsMicroscaled(spec)) return "affine";
  return spec.format == Format::kFp4E2M1 ? "mxfp4" : "mxfp8";
}

/// The e4m3 scales times the global one. Errors: kUnsupported for a product that e4m3 does not
/// hold.
Result<std::vector<uint8_t>> ProductScales(const QuantizedWeights& matrix) {
  const float global = *matrix.global_scale.As<float>();
  const bool divides = matrix.spec.global_scale_divides;
  std::vector<uint8_t> products(static_cast<size_t>(matrix.scales.ElementCount()));
  for (size_t i = 0; i < products.size(); ++i) {
    const float scale = Fp8E4M3ToFloat(matrix.scales.As<uint8_t>()[i]);
    const float product = divides ? scale / global : scale * global;
    products[i] = FloatToFp8E4M3(product);
    if (Fp8E4M3ToFloat(products[i]) == product) continue;
    return WouldLose(kMlxName, fmt::format("the global scale {:.9g}: with it the scale {} becomes "
                                           "{:.9g}, which e4m3 does not hold",
                                           global, scale, product));
  }
  return products;
}

/// The name of a module in mlx_lm's models, where Mixtral's projections are named as in all others.
std::string NameOf(const std::string& name) {
  constexpr std::string_view kExpertsPart = "experts.*.";
  const size_t at = name.find(kExpertsPart);
  if (at == std::string::npos) return name;
  std::string_view projection = std::string_view(name).substr(at + kExpertsPart.size());
  const auto* const found =
      std::find(kShortProjections.begin(), kShortProjections.end(), projection);
  if (found != kShortProjections.end()) {
    projection = kUsualProjections[static_cast<size_t>(found - kShortProjections.begin())];
  }
  return fmt::format("{}switch_mlp.{}", name.substr(0, at), projection);
}

class MlxWriter final : public ModuleWriter {
 public:
  bool StacksExperts() const override { return true; }

  Result<OutputUnit> Plan(const ForeignModule& module) const override {
    const WeightsSpec& spec = module.spec;
    const bool micro = IsMicroscaled(spec);
    const int bits = micro ? GetFormatInfo(spec.format).bits : UnsignedCodesOf(spec.format).bits;
    if (bits == 0 || (!micro && DTypeBytes(ScaleDType(spec.scale_type)) == 1)) {
      return WouldLose(kMlxName,
                       fmt::format("{} in groups of {} with {} scales", FormatName(spec.format),
                                   spec.group_size, ScaleTypeName(spec.scale_type)));
    }
    const bool size =
        IsNvfp4(spec) || spec.group_size == 32 || spec.group_size == 64 || spec.group_size == 128;
    if (!size || spec.k % spec.group_size != 0) {
      return CannotHold(
          kMlxName, fmt::format("{} k in groups of {}: groups of 32, 64 or 128 divide k", spec.k,
                                spec.group_size));
    }
    const auto add = [&](std::string_view part, DType dtype, int64_t columns, OutputUnit* unit) {
      Shape shape;
      if (module.stacked) shape.Append(spec.experts);
      shape.Append(spec.n);
      shape.Append(columns);
      unit->push_back({fmt::format("{}.{}", NameOf(module.name), part), dtype, shape});
    };
    OutputUnit unit;
    const int64_t groups = GroupCount(spec);
    add("weight", DType::kU32, spec.k * bits / 32, &unit);
    const DType scales = micro ? DType::kU8 : ScaleDType(spec.scale_type);
    add("scales", scales, groups, &unit);
    if (!micro) add("biases", scales, groups, &unit);
    return unit;
  }

  Status Write(const QuantizedWeights& matrix, TensorSink* sink) const override {
    const WeightsSpec& spec = matrix.spec;
    const bool micro = IsMicroscaled(spec);
    if (!micro) MARLIN_RETURN_IF_ERROR(CheckCountingCodebook(kMlxName, matrix));
    const int bits = GetFormatInfo(spec.format).bits;
    const UnsignedCodes codes = UnsignedCodesOf(spec.format);
    std::vector<uint8_t> run;
    MARLIN_RETURN_IF_ERROR(ForEachColumns(
        matrix, codes.flip, [&](int64_t, int64_t count, const uint8_t* from, int64_t stride) {
          run.clear();
          for (int64_t c = 0; c < count; ++c) {
            run.insert(run.end(), from + c * stride, from + c * stride + spec.k);
          }
          const std::vector<uint32_t> words = PackRuns(run, spec.k, bits);
          return sink->AppendAll(0, words);
        }));
    TensorView stored = matrix.scales;
    std::vector<uint8_t> products;
    if (IsNvfp4(spec)) {
      MARLIN_ASSIGN_OR_RETURN(products, ProductScales(matrix));
      stored = TensorView(products.data(), stored.dtype(), stored.shape());
    }
    MARLIN_ASSIGN_OR_RETURN(const std::vector<std::byte> scales,
                            TransposedParameters(kMlxName, "scale", stored, stored.dtype()));
    MARLIN_RETURN_IF_ERROR(sink->AppendAll(1, scales));
    return micro ? Status() : WriteBiases(matrix, sink);
  }

  Status Configure(std::span<const ForeignModule> modules, std::span<const std::string> /*plain*/,
                   Json* config) const override {
    const auto settings = [](const ForeignModule& module) {
      return Json{{"group_size", module.spec.group_size},
                  {"bits", GetFormatInfo(module.spec.format).bits},
                  {"mode", ModeOf(module.spec)}};
    };
    Json quantization = Json::object();
    for (const ForeignModule& module : modules) {
      if (!module.stacked && ParseExpertName(module.name)) {
        return WouldLose(
            kMlxName,
            fmt::format("\"{}\": experts of one layer in several formats, or stored one by one",
                        Printable(module.name)));
      }
      MARLIN_RETURN_IF_ERROR(CheckLatent(module, *config));
      const Json own = settings(module);
      if (&module == &modules.front()) quantization = own;
      // Every module is listed, so that those without an entry are known to be unquantized.
      quantization[NameOf(module.name)] = own;
    }
    (*config)["quantization"] = quantization;
    (*config)["quantization_config"] = std::move(quantization);
    return TakeMlxNames(config);
  }

 private:
  /// mlx_lm splits the matrix of MLA's keys and values, transposes the keys and quantizes both
  /// again, in the same groups.
  static Status CheckLatent(const ForeignModule& module, const Json& config) {
    const auto type = config.find("model_type");
    const bool stays = type != config.end() && *type == "deepseek_v2";
    if (stays || !module.name.ends_with(".kv_b_proj")) return {};
    const auto nope = config.find("qk_nope_head_dim");
    const bool divides = nope != config.end() && nope->is_number_unsigned() &&
                         nope->get<uint64_t>() % static_cast<uint64_t>(module.spec.group_size) == 0;
    if (divides && !IsMicroscaled(module.spec)) return {};
    return CannotHold(
        kMlxName, fmt::format("\"{}\" in {} in groups of {}: mlx_lm splits and quantizes it again, "
                              "in groups that divide qk_nope_head_dim; --override kv_b_proj=keep "
                              "leaves it as it is",
                              Printable(module.name), FormatName(module.spec.format),
                              module.spec.group_size));
  }

  static Status WriteBiases(const QuantizedWeights& matrix, TensorSink* sink) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<float> biases, AdditiveBiases(kMlxName, matrix));
    const TensorView view(biases.data(), DType::kF32, matrix.scales.shape());
    MARLIN_ASSIGN_OR_RETURN(const std::vector<std::byte> stored,
                            TransposedParameters(kMlxName, "bias", view, matrix.scales.dtype()));
    return sink->AppendAll(2, stored);
  }
};

}  // namespace

MakeWriter MakeMlxWriter;

std::unique_ptr<const ModuleWriter> MakeMlxWriter() { return std::make_unique<MlxWriter>(); }

}  // namespace marlin
