// The weight formats and what is fixed about each of them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// How one weight is coded. Names in files and commands are those of FormatName().
enum class Format : uint8_t {
#define MARLIN_FORMAT(enumerator, name, codec) enumerator,
#include "marlin/formats.def"
#undef MARLIN_FORMAT
};

/// Whether a format's groups may carry a zero point: weight = scale * (value(code) - zero).
enum class ZeroPoint : uint8_t { kNone, kOptional, kRequired };

/// The constants of a format.
struct FormatInfo {
  Format format;
  std::string_view name;
  int bits;              ///< Bits of a code: 2, 3, 4, 8, or 16 for the unquantized formats.
  ZeroPoint zero_point;  ///< Whether zeros may or must accompany the scales.
  bool quantized;        ///< False for bf16 and fp16, which have no scales.
  bool has_codebook;     ///< The value table is data and may be replaced by the user's.
  float min_value;       ///< Smallest value(code) of the built-in table.
  float max_value;       ///< Largest value(code) of the built-in table.
};

/// All formats, in the order of formats.def.
std::span<const FormatInfo> AllFormats();

/// The constants of one format. A value that is no Format has the name "unknown", 16 bits and no
/// quantized form, which every function refuses.
const FormatInfo& GetFormatInfo(Format format);

inline std::string_view FormatName(Format format) { return GetFormatInfo(format).name; }

/// Finds a format by its exact name. Errors: kInvalidArgument listing the known names.
Result<Format> ParseFormat(std::string_view name);

/// The built-in value of every code, [2^bits]; fp32 holds each exactly. Static storage. NaN codes
/// of fp8 are NaN here and are refused at load. Precondition: bits <= 8.
std::span<const float> FormatValues(Format format);

/// How a group's scale is stored.
enum class ScaleType : uint8_t {
  kF16,
  kBf16,
  kF32,
  kE8M0,  ///< 2^(byte - 127); byte 255 is NaN and refused.
  kE4M3,  ///< OCP FP8 E4M3FN, always together with one fp32 global scale per matrix.
};

/// The element type that holds a scale; that of kF16 for a value that is no ScaleType.
DType ScaleDType(ScaleType type);
/// "fp16", "bf16", "fp32", "e8m0", "e4m3"; "unknown" for a value that is no ScaleType.
std::string_view ScaleTypeName(ScaleType type);
/// Finds a scale type by name. Errors: kInvalidArgument listing the known names.
Result<ScaleType> ParseScaleType(std::string_view name);

}  // namespace marlin
#pragma GCC visibility pop
