// MLX. X.weight holds codes as u32 [n, k * bits / 32], dense along k; experts in front are stacked.
//   affine  X.scales and X.biases [n, groups]: weight = scale * code + bias
//   mxfp4, nvfp4, mxfp8  X.scales u8 [n, groups], no biases; nvfp4 perhaps with X.global_scale
// The types and shapes tell the modes apart; affine bits and group size are in the configuration.
#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/decoder_names.h"
#include "checkpoint/module_names.h"
#include "layout/parameters.h"
#include "recipe/model_config.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

struct MlxMode {
  std::string mode = "affine";
  int64_t bits = 4;
  int64_t group_size = 64;
};

struct FloatMode {
  std::string_view name;
  Format format;
  ScaleType scale_type;
  int64_t group_size;
  int64_t words_per_scale;  // Words of codes: what tells the modes apart.
};
constexpr FloatMode kFloatModes[] = {
    {"mxfp4", Format::kFp4E2M1, ScaleType::kE8M0, 32, 4},
    {"nvfp4", Format::kFp4E2M1, ScaleType::kE4M3, 16, 2},
    {"mxfp8", Format::kFp8E4M3, ScaleType::kE8M0, 32, 8},
};

// MLX stores the largest magnitude of the tensor, which the largest code times the largest scale
// shall reach.
constexpr float kLargestNvfp4 = 448.0f * 6.0f;

class MlxReaderBuilder {
 public:
  /// `style`: the names of experts in the model's type; null without experts.
  MlxReaderBuilder(const TensorStore& store, ModelConfig* json, const ExpertStyle* style)
      : store_(store), json_(*json), style_(style) {}

  Status AddModule(const std::string& base, ListedReader* reader) {
    ModuleTensorFinder finder(store_, base);
    MARLIN_ASSIGN_OR_RETURN(const MlxMode mode, ModeOf(base));
    MARLIN_ASSIGN_OR_RETURN(const size_t codes,
                            finder.Need(ModulePart::kCodes, ".weight", {DType::kU32}));
    MARLIN_ASSIGN_OR_RETURN(const size_t scales,
                            finder.Need(ModulePart::kScales, ".scales",
                                        {DType::kU8, DType::kF16, DType::kBf16, DType::kF32}));
    const Shape& shape = finder.ShapeOf(codes);
    Shape groups = finder.ShapeOf(scales);
    const int last = shape.rank() - 1;
    const bool fits = (last == 1 || last == 2) && groups.rank() == shape.rank() &&
                      shape.ElementCount() > 0 && groups.ElementCount() > 0 &&
                      groups[last - 1] == shape[last - 1] && groups[0] == shape[0];
    if (!fits) {
      return finder.Malformed(
          ".scales", fmt::format("{} does not fit {}", groups.ToString(), shape.ToString()));
    }
    RowWeights rows;
    rows.codes = codes;
    rows.scales = scales;
    rows.spec.experts = last == 2 ? shape[0] : 1;
    rows.spec.n = shape[last - 1];
    std::string name = PlainWeightName(Producer::kMlx, base, last == 2);
    if (style_ != nullptr && last == 2) name = ExpertNameInStyle(*style_, name);
    return finder.TypeOf(scales) == DType::kU8
               ? AddFloat(name, mode, shape[last], groups[last], std::move(rows), &finder, reader)
               : AddAffine(name, mode, shape[last], groups[last], std::move(rows), &finder, reader);
  }

 private:
  // The entry of a path replaces the general one whole: it does not inherit the mode.
  Result<MlxMode> ModeOf(const std::string& base) {
    constexpr std::string_view kWeight = ".weight";
    std::string path = StoredName(store_, base + std::string(kWeight));
    path.resize(path.size() - kWeight.size());
    ModelConfig own = json_.Nested(path);
    ModelConfig& json = json_.IsObject(path) ? own : json_;
    MlxMode mode;
    mode.mode = json.StringOr("mode", "affine");
    mode.bits = json.SizeOr("bits", 8, mode.mode == "mxfp8" ? 8 : 4);
    mode.group_size = json.SizeOr("group_size", INT32_MAX, 64);
    MARLIN_RETURN_IF_ERROR(json.status());
    return mode;
  }

  Status AddFloat(const std::string& name, const MlxMode& mode, int64_t words, int64_t groups,
                  RowWeights rows, ModuleTensorFinder* finder, ListedReader* reader) {
    const FloatMode* found = nullptr;
    for (const FloatMode& candidate : kFloatModes) {
      if (words % groups == 0 && words / groups == candidate.words_per_scale) found = &candidate;
    }
    if (found == nullptr) {
      return finder->Malformed(
          ".scales", fmt::format("{} words of codes and {} scales in a row fit no mode of mxfp4, "
                                 "nvfp4, mxfp8",
                                 words, groups));
    }
    if (mode.mode != found->name) {
      return finder->Malformed(".weight", fmt::format("is {}, the configuration says {}",
                                                      found->name, Printable(mode.mode)));
    }
    rows.spec.format = found->format;
    rows.spec.k = groups * found->group_size;
    rows.spec.group_size = found->group_size;
    rows.spec.scale_type = found->scale_type;
    if (found->scale_type == ScaleType::kE4M3) {
      rows.spec.has_global_scale = true;
      rows.global_scale.assign(static_cast<size_t>(rows.spec.experts), 1.0f);
      if (finder->Has(".global_scale")) {
        MARLIN_ASSIGN_OR_RETURN(const size_t global, finder->Need(ModulePart::kGlobalScale,
                                                                  ".global_scale", {DType::kF32}));
        if (finder->ShapeOf(global).ElementCount() != 1) {
          return finder->Malformed(
              ".global_scale", "expected one number, got " + finder->ShapeOf(global).ToString());
        }
        const float scale = ParameterAt(finder->Data(global), DType::kF32, 0) / kLargestNvfp4;
        rows.global_scale.assign(rows.global_scale.size(), scale);
      }
    }
    AddRows(name, std::move(rows), finder, reader);
    return {};
  }

  Status AddAffine(const std::string& name, const MlxMode& mode, int64_t words, int64_t groups,
                   RowWeights rows, ModuleTensorFinder* finder, ListedReader* reader) {
    const DType type = finder->TypeOf(*rows.scales);
    MARLIN_ASSIGN_OR_RETURN(
        const size_t biases,
        finder->Need(ModulePart::kBiases, ".biases", {type}, finder->ShapeOf(*rows.scales)));
    const std::optional<int64_t> k = (Checked(groups) * Checked(mode.group_size)).Take();
    const bool known = mode.mode == "affine" && mode.bits != 1 && mode.bits != 7;
    if (!known) {
      return finder->Malformed(
          ".weight", fmt::format("has biases, the configuration says mode {} with {} bits",
                                 Printable(mode.mode), mode.bits));
    }
    if (!k || (Checked(*k) * Checked(mode.bits)).Take() != (Checked(words) * Checked(32)).Take()) {
      return finder->Malformed(
          ".weight", fmt::format("{} words in a row do not hold {} groups of {} codes of {} bits",
                                 words, groups, mode.group_size, mode.bits));
    }
    rows.spec.k = *k;
    rows.spec.group_size = mode.group_size;
    rows.spec.scale_type = *ScaleTypeOf(type);
    rows.spec.has_biases = true;
    rows.biases = biases;
    // A product of fp32 scale and code is rounded before the bias is added; shorter scales give
    // exact products.
    if (type == DType::kF32) rows.exactness = Exactness::kLastBit;
    const auto bits = static_cast<int>(mode.bits);
    rows.spec.format = IntegerFormat(bits, /*is_unsigned=*/true);
    // Two and three bits are unsigned here, too: a codebook of 0, 1, 2, ...
    if (bits < 4) rows.spec.format = bits == 2 ? Format::kNf2 : Format::kNf3;
    if (bits < 4) {
      for (int i = 0; i < 1 << bits; ++i) rows.codebook.push_back(static_cast<float>(i));
    }
    AddRows(name, std::move(rows), finder, reader);
    return {};
  }

  const TensorStore& store_;
  ModelConfig& json_;
  const ExpertStyle* style_;
};

/// The names of experts in the type of a model; null for an unknown type or one without experts.
const ExpertStyle* StyleOf(const Json& config) {
  if (!config.is_object()) return nullptr;
  const Result<const Family*> family = FindFamily(TextModelType(config));
  return family.ok() ? (*family)->experts : nullptr;
}

}  // namespace

OpenReader OpenMlx;

Result<std::unique_ptr<const ModuleReader>> OpenMlx(TensorStore& store, const QuantMethod& method) {
  ModelConfig json = ModelConfig::Of(*method.config, method.where);
  return ListedReader::Open(store, [&](ListedReader* reader) -> Status {
    MlxReaderBuilder builder(store, &json, StyleOf(store.config()));
    for (const std::string& base : BasesWithSuffix(store, ".scales")) {
      MARLIN_RETURN_IF_ERROR(builder.AddModule(base, reader));
    }
    return {};
  });
}

}  // namespace marlin
