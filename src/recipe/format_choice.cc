// The text form of a format choice: "fp4_e2m1/g128", "fp4_e2m1/g32/e8m0", "int3/gK/sym",
// "s4/g64/2:4", "bf16", "keep".
#include <fmt/core.h>

#include <charconv>
#include <optional>
#include <string>

#include "base/macros.h"
#include "base/printable.h"
#include "layout/input_transform.h"
#include "layout/sparse_24.h"
#include "marlin/recipe.h"

namespace marlin {
namespace {

Status InvalidChoice(std::string_view text, const std::string& reason) {
  return Status(Code::kInvalidArgument,
                fmt::format("format choice '{}': {}", Printable(text), reason));
}

Result<int64_t> ParseGroup(std::string_view text, std::string_view part) {
  if (part == "gK") return int64_t{0};
  int64_t group_size = 0;
  const char* end = part.data() + part.size();
  const auto [stop, error] = std::from_chars(part.data() + 1, end, group_size);
  if (error != std::errc() || stop != end) {
    return InvalidChoice(
        text, fmt::format("'{}' is not a group size; expected gN or gK", Printable(part)));
  }
  if (group_size == 0) {
    return InvalidChoice(text, "group size 0; write gK for one group along all of K");
  }
  if (Status status = CheckGroupSize(group_size); !status.ok()) {
    return InvalidChoice(text, status.message());
  }
  return group_size;
}

Result<int64_t> ParseHadamard(std::string_view text, std::string_view part) {
  int64_t size = 0;
  const char* end = part.data() + part.size();
  const auto [stop, error] = std::from_chars(part.data() + 1, end, size);
  if (error == std::errc() && stop == end && IsHadamardSize(size)) return size;
  return InvalidChoice(
      text, fmt::format("'{}' is no size of Hadamard blocks; expected hN, a power of two "
                        "from 2 to {}",
                        Printable(part), kMaxHadamard));
}

std::optional<E8M0Rule> FindRule(std::string_view part) {
  for (const E8M0Rule rule : {E8M0Rule::kFloor, E8M0Rule::kCeil, E8M0Rule::kNearest}) {
    if (part == E8M0RuleName(rule)) return rule;
  }
  return std::nullopt;
}

/// Checks that the parts of a choice go together.
Status CheckParts(std::string_view text, const FormatChoice& choice) {
  const std::string_view name = FormatName(choice.format);
  if (choice.e8m0_rule != E8M0Rule::kDefault && choice.scale_type != ScaleType::kE8M0) {
    return InvalidChoice(
        text, fmt::format("'{}' rounds scales of type e8m0, these are {}",
                          E8M0RuleName(choice.e8m0_rule), ScaleTypeName(choice.scale_type)));
  }
  if (choice.symmetric && GetFormatInfo(choice.format).zero_point == ZeroPoint::kRequired) {
    return InvalidChoice(text, fmt::format("{} needs zero points and cannot be symmetric", name));
  }
  const ZeroPoint zero = GetFormatInfo(choice.format).zero_point;
  const bool has_zeros =
      zero == ZeroPoint::kRequired || (zero == ZeroPoint::kOptional && !choice.symmetric);
  if (choice.fractional_zeros && !has_zeros) {
    return InvalidChoice(text, fmt::format("{} has no zero points that could be fractional", name));
  }
  if (choice.sparsity == Sparsity::k24) {
    const Status possible = CheckSparse24(choice.format, has_zeros);
    if (!possible.ok())
      return Status(possible.code(), InvalidChoice(text, possible.message()).message());
  }
  return {};
}

}  // namespace

Status CheckGroupSize(int64_t group_size) {
  if (group_size >= 0 && group_size % 16 == 0) return Status();
  return Status(Code::kInvalidArgument,
                fmt::format("group size: expected a multiple of 16, got {}", group_size));
}

std::string FormatChoice::ToString() const {
  if (keep) return "keep";
  std::string text(FormatName(format));
  if (!GetFormatInfo(format).quantized) return text;
  text += group_size == 0 ? "/gK" : fmt::format("/g{}", group_size);
  if (scale_type != ScaleType::kF16) {
    text += "/";
    text += ScaleTypeName(scale_type);
  }
  if (e8m0_rule != E8M0Rule::kDefault) {
    text += "/";
    text += E8M0RuleName(e8m0_rule);
  }
  if (symmetric) text += "/sym";
  if (fractional_zeros) text += "/frac";
  if (sparsity != Sparsity::kDense) {
    text += "/";
    text += SparsityName(sparsity);
  }
  if (input_hadamard > 0) text += fmt::format("/h{}", input_hadamard);
  return text;
}

Result<FormatChoice> ParseFormatChoice(std::string_view text) {
  FormatChoice choice;
  if (text == "keep") return choice;
  choice.keep = false;
  const size_t slash = text.find('/');
  const std::string_view name = text.substr(0, slash);
  if (name.empty()) return InvalidChoice(text, "the format's name is missing");
  Result<Format> format = ParseFormat(name);
  if (!format.ok()) return InvalidChoice(text, format.status().message());
  choice.format = *format;
  if (!GetFormatInfo(choice.format).quantized) {
    if (slash == std::string_view::npos) return choice;
    return InvalidChoice(text, fmt::format("{} has no groups; write '{}' alone", name, name));
  }
  bool has_group = false;
  bool has_scale = false;
  std::string_view rest = slash == std::string_view::npos ? "" : text.substr(slash);
  while (!rest.empty()) {
    const size_t next = rest.find('/', 1);
    const std::string_view part = rest.substr(1, next == std::string_view::npos ? next : next - 1);
    rest = next == std::string_view::npos ? "" : rest.substr(next);
    if (part == "sym" && !choice.symmetric) {
      choice.symmetric = true;
    } else if (part == "frac" && !choice.fractional_zeros) {
      choice.fractional_zeros = true;
    } else if (part == SparsityName(Sparsity::k24) && choice.sparsity == Sparsity::kDense) {
      choice.sparsity = Sparsity::k24;
    } else if (part.starts_with('h') && choice.input_hadamard == 0) {
      MARLIN_ASSIGN_OR_RETURN(choice.input_hadamard, ParseHadamard(text, part));
    } else if (const auto rule = FindRule(part); rule && choice.e8m0_rule == E8M0Rule::kDefault) {
      choice.e8m0_rule = *rule;
    } else if (part.starts_with('g') && !has_group) {
      MARLIN_ASSIGN_OR_RETURN(choice.group_size, ParseGroup(text, part));
      has_group = true;
    } else if (Result<ScaleType> type = ParseScaleType(part); type.ok() && !has_scale) {
      choice.scale_type = *type;
      has_scale = true;
    } else {
      return InvalidChoice(text,
                           fmt::format("unexpected part '{}'; expected "
                                       "FORMAT/gN[/SCALE_TYPE][/floor|/ceil|/nearest][/sym|/frac]"
                                       "[/2:4][/hN]",
                                       Printable(part)));
    }
  }
  if (!has_group) return InvalidChoice(text, "the group size is missing; expected FORMAT/gN");
  MARLIN_RETURN_IF_ERROR(CheckParts(text, choice));
  return choice;
}

}  // namespace marlin
