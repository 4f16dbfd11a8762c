#include "plan/gemm/kernel_name.h"

#include <fmt/core.h>

#include <charconv>

#include "base/printable.h"

namespace marlin {
namespace {

/// An integer from 1 up that is all of the text; otherwise 0.
int ParsePositive(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value > 0 ? value : 0;
}

}  // namespace

std::string KernelVariant::ToString() const {
  return automatic() ? std::string() : fmt::format("{}x{}", width, splits);
}

std::string ToString(std::string_view kernel, const KernelVariant& variant) {
  return variant.automatic() ? std::string(kernel)
                             : fmt::format("{}@{}", kernel, variant.ToString());
}

Result<KernelName> ParseKernelName(std::string_view text) {
  const size_t at = text.find('@');
  KernelName name = {text.substr(0, at), {}};
  if (at == std::string_view::npos) return name;
  const std::string_view variant = text.substr(at + 1);
  const size_t times = variant.find('x');
  if (times != std::string_view::npos) {
    name.variant = {ParsePositive(variant.substr(0, times)),
                    ParsePositive(variant.substr(times + 1))};
  }
  if (name.variant.width > 0 && name.variant.splits > 0) return name;
  return Status(
      Code::kInvalidArgument,
      fmt::format("kernel: expected NAME or NAME@WIDTHxSPLITS, got '{}'", Printable(text)));
}

}  // namespace marlin
