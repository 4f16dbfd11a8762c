// The weight formats and their constants.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "marlin/status.h"
#include "marlin/tensor.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The encoding of one weight. Files and commands use the names of FormatName().
enum class Format : uint8_t {
#define MARLIN_FORMAT(enumerator, name, codec) enumerator,
#include "marlin/formats.def"
#undef MARLIN_FORMAT
};

/// Whether a format's groups may carry a zero point: weight = scale * (value(code) - zero).
enum class ZeroPoint : uint8_t {
  kNone,      ///< No weights have zeros.
  kOptional,  ///< Quantize makes zeros unless QuantizeOptions::symmetric.
  kRequired,  ///< All weights have zeros or biases.
  kAccepted,  ///< Weights of other quantizers may have zeros; Quantize makes none.
};

/// The constants of a format.
struct FormatInfo {
  Format format;
  std::string_view name;
  int bits;              ///< Bits per code: 2 to 6 or 8; unquantized formats: 16 or 32.
  ZeroPoint zero_point;  ///< Whether zeros may or must accompany the scales.
  bool quantized;        ///< False for bf16, fp16 and fp32, which have no scales.
  bool has_codebook;     ///< The value table is data, which a user may replace.
  float min_value;       ///< Smallest value(code) of the built-in table.
  float max_value;       ///< Largest value(code) of the built-in table.
};

/// All formats, in the order of formats.def.
std::span<const FormatInfo> AllFormats();

/// The constants of one format. An invalid enumerator yields the name "unknown", 16 bits and no
/// quantized form; every function rejects it.
const FormatInfo& GetFormatInfo(Format format);

/// The name of a format, "fp4_e2m1".
inline std::string_view FormatName(Format format) { return GetFormatInfo(format).name; }

/// Finds a format by its exact name. Errors: kInvalidArgument listing the known names.
Result<Format> ParseFormat(std::string_view name);

/// The built-in value of every code, [2^bits], exact in fp32. Static storage. NaN codes of fp8 are
/// NaN here and are rejected at load. Precondition: bits <= 8.
std::span<const float> FormatValues(Format format);

/// How a group's scale is stored.
enum class ScaleType : uint8_t {
  kF16,
  kBf16,
  kF32,
  kE8M0,  ///< 2^(byte - 127); byte 255 is NaN and rejected.
  kE4M3,  ///< OCP FP8 E4M3FN, always with one fp32 global scale per matrix.
};

/// All scale types.
std::span<const ScaleType> AllScaleTypes();
/// The element type of a scale; f16 for an invalid enumerator.
DType ScaleDType(ScaleType type);
/// "fp16", "bf16", "fp32", "e8m0", "e4m3"; "unknown" for an invalid enumerator.
std::string_view ScaleTypeName(ScaleType type);
/// Finds a scale type by name. Errors: kInvalidArgument listing the known names.
Result<ScaleType> ParseScaleType(std::string_view name);

}  // namespace marlin
#pragma GCC visibility pop
