// compressed-tensors. Codes of a row of the weight [n, k] are packed along k, the first lowest.
//
//   pack-quantized  X.weight_packed i32 [n, k * bits / 32], X.weight_scale [n, groups],
//                   X.weight_shape i64 [2], and X.weight_zero_point i32 [n * bits / 32, groups],
//                   packed along n, where the scheme is asymmetric; codes of 3, 5 and 6 bits cross
//                   words
//   float-quantized X.weight e4m3 [n, k], X.weight_scale [n, groups]; mxfp8 with exponents, u8
//   nvfp4           X.weight_packed u8 [n, k / 2], X.weight_scale e4m3 [n, k / 16],
//                   X.weight_global_scale f32 [1], by which scales are divided
//   mxfp4           X.weight_packed u8 [n, k / 2], X.weight_scale u8 [n, k / 32], exponents; mxfp6
//                   with four codes in three bytes
#include <fmt/core.h>

#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/codes/foreign_codes.h"
#include "checkpoint/module_writer.h"
#include "recipe/expert_name.h"

namespace marlin {
namespace {

constexpr std::string_view kCtName = "compressed-tensors";

enum class Scheme { kPacked, kNvFp4, kMxFp4, kMxFp6, kFloat, kMxFp8 };

/// Experts that are stored one by one.
constexpr std::string_view kExpertTargets = R"(re:.*\.experts\.\d+\..*)";

/// Since this version codes of 3, 5 and 6 bits cross words.
constexpr std::string_view kDenseVersion = "0.18.0";

constexpr std::string_view NameOf(Scheme scheme) {
  constexpr std::array<std::string_view, 6> kNames = {
      "pack-quantized",       "nvfp4-pack-quantized", "mxfp4-pack-quantized",
      "mxfp6-pack-quantized", "float-quantized",      "mxfp8-quantized"};
  return kNames[static_cast<size_t>(scheme)];
}

std::optional<Scheme> SchemeOf(const WeightsSpec& spec) {
  if (spec.has_biases) return std::nullopt;
  if (spec.format == Format::kFp4E2M1) {
    if (spec.scale_type == ScaleType::kE4M3 && spec.group_size == 16) return Scheme::kNvFp4;
    if (spec.scale_type == ScaleType::kE8M0 && spec.group_size == 32) return Scheme::kMxFp4;
    return std::nullopt;
  }
  if (spec.format == Format::kFp6E2M3) {
    const bool micro = spec.scale_type == ScaleType::kE8M0 && spec.group_size == 32;
    return micro ? std::optional(Scheme::kMxFp6) : std::nullopt;
  }
  const bool wide = DTypeBytes(ScaleDType(spec.scale_type)) > 1;
  if (spec.format == Format::kFp8E4M3) {
    if (spec.scale_type == ScaleType::kE8M0 && spec.group_size == 32) return Scheme::kMxFp8;
    return wide ? std::optional(Scheme::kFloat) : std::nullopt;
  }
  if (UnsignedCodesOf(spec.format).bits == 0 || GetFormatInfo(spec.format).has_codebook) {
    return std::nullopt;
  }
  return wide ? std::optional(Scheme::kPacked) : std::nullopt;
}

/// One entry of config_groups, without its targets.
Json GroupOf(const WeightsSpec& spec) {
  const Scheme scheme = *SchemeOf(spec);
  Json weights = {{"num_bits", GetFormatInfo(spec.format).bits},
                  {"type", scheme == Scheme::kPacked ? "int" : "float"},
                  {"symmetric", !spec.has_zeros},
                  {"dynamic", false}};
  if ((scheme == Scheme::kPacked || scheme == Scheme::kFloat) && spec.group_size >= spec.k) {
    weights["strategy"] = "channel";
  } else {
    weights["strategy"] = scheme == Scheme::kNvFp4 ? "tensor_group" : "group";
    weights["group_size"] = spec.group_size;
  }
  if (scheme == Scheme::kNvFp4) weights["scale_dtype"] = "torch.float8_e4m3fn";
  if (scheme == Scheme::kMxFp4 || scheme == Scheme::kMxFp6 || scheme == Scheme::kMxFp8) {
    weights["scale_dtype"] = "torch.uint8";
  }
  return {{"weights", std::move(weights)},
          {"input_activations", nullptr},
          {"output_activations", nullptr},
          {"format", NameOf(scheme)}};
}

/// The global scale by which e4m3 scales are divided to the same fp32 numbers.
Result<float> DivisorOf(const QuantizedWeights& matrix) {
  if (matrix.spec.global_scale_divides) return *matrix.global_scale.As<float>();
  return InverseGlobalScale(kCtName, matrix);
}

class CompressedTensorsWriter final : public ModuleWriter {
 public:
  Result<OutputUnit> Plan(const ForeignModule& module) const override {
    const WeightsSpec& spec = module.spec;
    const std::optional<Scheme> scheme = SchemeOf(spec);
    if (!scheme) {
      return WouldLose(kCtName,
                       fmt::format("{} in groups of {} with {} scales{}", FormatName(spec.format),
                                   spec.group_size, ScaleTypeName(spec.scale_type),
                                   spec.has_biases ? " and biases" : ""));
    }
    MARLIN_RETURN_IF_ERROR(CheckWholeGroups(kCtName, spec));
    const int64_t bits = GetFormatInfo(spec.format).bits;
    const int64_t groups = GroupCount(spec);
    const auto name = [&](std::string_view part) {
      return fmt::format("{}.{}", module.name, part);
    };
    if (*scheme == Scheme::kPacked) {
      OutputUnit unit = {
          {name("weight_packed"), DType::kI32, {spec.n, Words(spec.k, bits)}},
          {name("weight_scale"), ScaleDType(spec.scale_type), {spec.n, groups}},
          {name("weight_shape"), DType::kI64, {2}},
      };
      if (spec.has_zeros) {
        unit.push_back({name("weight_zero_point"), DType::kI32, {Words(spec.n, bits), groups}});
      }
      return unit;
    }
    if (*scheme == Scheme::kFloat) {
      return OutputUnit{{name("weight"), DType::kF8E4M3, {spec.n, spec.k}},
                        {name("weight_scale"), ScaleDType(spec.scale_type), {spec.n, groups}}};
    }
    if (spec.k % spec.group_size != 0) {
      return CannotHold(kCtName, fmt::format("{} k in one group of {}", spec.k, spec.group_size));
    }
    if (*scheme == Scheme::kMxFp8) {
      return OutputUnit{{name("weight"), DType::kF8E4M3, {spec.n, spec.k}},
                        {name("weight_scale"), DType::kU8, {spec.n, groups}}};
    }
    OutputUnit unit = {{name("weight_packed"), DType::kU8, {spec.n, spec.k * bits / 8}}};
    if (*scheme == Scheme::kNvFp4) {
      unit.push_back({name("weight_scale"), DType::kF8E4M3, {spec.n, groups}});
      unit.push_back({name("weight_global_scale"), DType::kF32, {1}});
    } else {
      unit.push_back({name("weight_scale"), DType::kU8, {spec.n, groups}});
    }
    return unit;
  }

  Status Write(const QuantizedWeights& matrix, TensorSink* sink) const override {
    const WeightsSpec& spec = matrix.spec;
    MARLIN_RETURN_IF_ERROR(WriteCodes(matrix, sink));
    MARLIN_ASSIGN_OR_RETURN(
        const std::vector<std::byte> scales,
        TransposedParameters(kCtName, "scale", matrix.scales, matrix.scales.dtype()));
    MARLIN_RETURN_IF_ERROR(sink->AppendAll(1, scales));
    if (*SchemeOf(spec) != Scheme::kPacked) {
      if (!spec.has_global_scale) return {};
      MARLIN_ASSIGN_OR_RETURN(const float divisor, DivisorOf(matrix));
      return sink->Append(2, &divisor, sizeof(divisor));
    }
    const std::array<int64_t, 2> shape = {spec.n, spec.k};
    MARLIN_RETURN_IF_ERROR(sink->Append(2, shape.data(), sizeof(shape)));
    return spec.has_zeros ? WriteZeros(matrix, sink) : Status();
  }

  Status Configure(std::span<const ForeignModule> modules, std::span<const std::string> plain,
                   Json* config) const override {
    std::map<std::string, Json> groups;   // By the text of the scheme.
    std::map<std::string, Json> experts;  // The targets that are experts, likewise.
    std::string_view format;
    bool mixed = false;
    bool straddles = false;
    for (const ForeignModule& module : modules) {
      const Json group = GroupOf(module.spec);
      const std::string_view own = NameOf(*SchemeOf(module.spec));
      mixed = mixed || (!format.empty() && own != format);
      straddles = straddles || 32 % GetFormatInfo(module.spec.format).bits != 0;
      format = own;
      const auto known = groups.try_emplace(DumpJson(group), group).first;
      const bool expert = ParseExpertName(module.name).has_value();
      (expert ? experts[known->first] : known->second["targets"]).push_back(module.name);
    }
    // transformers, which fuses experts, finds their scheme by an expression, or takes the first
    // one; and names of thousands of experts are more than readers accept.
    if (experts.size() == 1) experts.begin()->second = Json::array({kExpertTargets});
    for (const auto& [text, names] : experts) {
      Json& targets = groups.at(text)["targets"];
      for (const Json& name : names) targets.push_back(name);
    }
    Json config_groups = Json::object();
    for (auto& [text, group] : groups) {
      config_groups[fmt::format("group_{}", config_groups.size())] = std::move(group);
    }
    (*config)["quantization_config"] = {
        {"quant_method", "compressed-tensors"},
        {"format", mixed            ? "mixed-precision"
                   : format.empty() ? "dense"
                                    : format},
        {"quantization_status", "compressed"},
        {"config_groups", std::move(config_groups)},
        {"ignore", std::vector<std::string>(plain.begin(), plain.end())},
        {"kv_cache_scheme", nullptr}};
    // Some sizes take the same number of words in the older packing, where codes do not cross them.
    if (straddles) (*config)["quantization_config"]["version"] = kDenseVersion;
    return {};
  }

 private:
  static int64_t Words(int64_t count, int64_t bits) { return (count * bits + 31) / 32; }

  static Status WriteCodes(const QuantizedWeights& matrix, TensorSink* sink) {
    const WeightsSpec& spec = matrix.spec;
    const int bits = GetFormatInfo(spec.format).bits;
    const bool words = *SchemeOf(spec) == Scheme::kPacked;
    const auto row = static_cast<size_t>(words ? Words(spec.k, bits) * 4 : spec.k * bits / 8);
    std::vector<uint8_t> packed;
    const uint8_t flip = UnsignedCodesOf(spec.format).flip;
    return ForEachColumns(matrix, flip,
                          [&](int64_t, int64_t count, const uint8_t* codes, int64_t stride) {
                            packed.assign(row * static_cast<size_t>(count), 0);
                            for (int64_t c = 0; c < count; ++c) {
                              uint8_t* const to = packed.data() + static_cast<size_t>(c) * row;
                              for (int64_t k = 0; k < spec.k; ++k) {
                                const int64_t bit = k * bits;
                                const int shifted = codes[c * stride + k] << (bit % 8);
                                to[bit / 8] |= static_cast<uint8_t>(shifted);
                                if (shifted >> 8 != 0)
                                  to[bit / 8 + 1] |= static_cast<uint8_t>(shifted >> 8);
                              }
                            }
                            return sink->AppendAll(0, packed);
                          });
  }

  static Status WriteZeros(const QuantizedWeights& matrix, TensorSink* sink) {
    const WeightsSpec& spec = matrix.spec;
    const int bits = GetFormatInfo(spec.format).bits;
    const int64_t groups = GroupCount(spec);
    MARLIN_ASSIGN_OR_RETURN(const std::vector<uint8_t> zeros, UnsignedZeros(kCtName, matrix));
    // [groups, n] packed along n gives [groups, words]; the file has the transpose.
    const std::vector<uint32_t> rows = PackRuns(zeros, spec.n, bits);
    const int64_t words = Words(spec.n, bits);
    std::vector<uint32_t> columns(rows.size());
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t w = 0; w < words; ++w) {
        columns[static_cast<size_t>(w * groups + g)] = rows[static_cast<size_t>(g * words + w)];
      }
    }
    return sink->AppendAll(3, columns);
  }
};

}  // namespace

MakeWriter MakeCompressedTensorsWriter;

std::unique_ptr<const ModuleWriter> MakeCompressedTensorsWriter() {
  return std::make_unique<CompressedTensorsWriter>();
}

}  // namespace marlin
