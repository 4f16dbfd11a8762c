// The runtime table of all formats, built from formats.def and the codecs.
#include <array>
#include <iterator>
#include <string>

#include "base/find_named.h"
#include "formats/codecs.h"
#include "marlin/format.h"

namespace marlin {
namespace {

template <typename Codec>
constexpr size_t kCodeCount = Codec::kBits <= 8 ? size_t{1} << Codec::kBits : 0;

template <typename Codec>
const std::array<float, kCodeCount<Codec>>& ValuesOf() {
  static const auto values = [] {
    std::array<float, kCodeCount<Codec>> table{};
    for (size_t code = 0; code < table.size(); ++code) {
      table[code] = Codec::Value(static_cast<uint32_t>(code));
    }
    return table;
  }();
  return values;
}

template <typename Codec>
FormatInfo MakeInfo(Format format, std::string_view name) {
  FormatInfo info{format,
                  name,
                  Codec::kBits,
                  static_cast<ZeroPoint>(Codec::kZero),
                  Codec::kQuantized != 0,
                  Codec::kHasCodebook != 0,
                  0.0f,
                  0.0f};
  for (float value : ValuesOf<Codec>()) {
    if (value - value != 0.0f) continue;  // NaN and Inf codes are not weights.
    info.min_value = value < info.min_value ? value : info.min_value;
    info.max_value = value > info.max_value ? value : info.max_value;
  }
  return info;
}

const auto& Table() {
  static const auto table = std::to_array<FormatInfo>({
#define MARLIN_FORMAT(enumerator, name, codec) MakeInfo<formats::codec>(Format::enumerator, #name),
#include "marlin/formats.def"
#undef MARLIN_FORMAT
  });
  return table;
}

constexpr ScaleType kScaleTypes[] = {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32,
                                     ScaleType::kE8M0, ScaleType::kE4M3};

struct ScaleTypeInfo {
  DType dtype;
  std::string_view name;
};
/// The constants of each scale type, in the order of the enumeration.
constexpr ScaleTypeInfo kScaleTypeInfos[] = {{DType::kF16, "fp16"},
                                             {DType::kBf16, "bf16"},
                                             {DType::kF32, "fp32"},
                                             {DType::kF8E8M0, "e8m0"},
                                             {DType::kF8E4M3, "e4m3"}};
static_assert(std::size(kScaleTypes) == std::size(kScaleTypeInfos));

}  // namespace

std::span<const FormatInfo> AllFormats() { return Table(); }

const FormatInfo& GetFormatInfo(Format format) {
  static constexpr FormatInfo kUnknown{.format = Format{},
                                       .name = "unknown",
                                       .bits = 16,
                                       .zero_point = ZeroPoint::kNone,
                                       .quantized = false,
                                       .has_codebook = false,
                                       .min_value = 0.0f,
                                       .max_value = 0.0f};
  const auto index = static_cast<size_t>(format);
  return index < Table().size() ? Table()[index] : kUnknown;
}

Result<Format> ParseFormat(std::string_view name) {
  const Result<FormatInfo> info = FindNamed("format", "name", name, AllFormats(),
                                            [](const FormatInfo& row) { return row.name; });
  if (info.ok()) return info->format;
  // What other programs call these formats.
  if (name == "int4" || name == "int8") {
    const std::string bits(name.substr(3));
    return Status(info.status().code(), info.status().message() + "; " + std::string(name) +
                                            " is s" + bits + ", with zero points u" + bits);
  }
  return info.status();
}

std::span<const float> FormatValues(Format format) {
  switch (format) {
#define MARLIN_FORMAT(enumerator, name, codec) \
  case Format::enumerator:                     \
    return ValuesOf<formats::codec>();
#include "marlin/formats.def"
#undef MARLIN_FORMAT
  }
  return {};
}

std::span<const ScaleType> AllScaleTypes() { return kScaleTypes; }

DType ScaleDType(ScaleType type) {
  const auto index = static_cast<size_t>(type);
  return index < std::size(kScaleTypeInfos) ? kScaleTypeInfos[index].dtype : DType::kF16;
}

std::string_view ScaleTypeName(ScaleType type) {
  const auto index = static_cast<size_t>(type);
  return index < std::size(kScaleTypeInfos) ? kScaleTypeInfos[index].name : "unknown";
}

Result<ScaleType> ParseScaleType(std::string_view name) {
  return FindNamed("scale type", "name", name, kScaleTypes, ScaleTypeName);
}

}  // namespace marlin
