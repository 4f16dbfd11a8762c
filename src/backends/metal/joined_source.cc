#include "backends/metal/joined_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/macros.h"

namespace marlin::metal {
namespace {

std::string_view WithoutSpace(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == std::string_view::npos ? std::string_view() : text.substr(first);
}

/// What a line includes by a quoted name.
std::optional<std::string_view> QuotedInclude(std::string_view line) {
  constexpr std::string_view kInclude = "include";
  line = WithoutSpace(line);
  if (!line.starts_with('#')) return std::nullopt;
  line = WithoutSpace(line.substr(1));
  if (!line.starts_with(kInclude)) return std::nullopt;
  line = WithoutSpace(line.substr(kInclude.size()));
  if (!line.starts_with('"')) return std::nullopt;
  const size_t end = line.find('"', 1);
  if (end == std::string_view::npos) return std::nullopt;
  return line.substr(1, end - 1);
}

class Joiner {
 public:
  explicit Joiner(std::span<const KernelFile> files) : files_(files) {}

  Status Add(std::string_view path, std::string_view asked_by) {
    const auto file = std::find_if(files_.begin(), files_.end(),
                                   [&](const KernelFile& each) { return each.path == path; });
    if (file == files_.end()) {
      return Status(
          Code::kInternal,
          fmt::format("{}: includes '{}', which the library does not hold", asked_by, path));
    }
    added_.push_back(path);
    text_ += fmt::format("#line 1 \"{}\"\n", path);
    return AddLines(path, file->text);
  }

  std::string Take() { return std::move(text_); }

 private:
  Status AddLines(std::string_view path, std::string_view text) {
    int number = 1;
    for (size_t begin = 0; begin < text.size(); ++number) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      const std::string_view line = text.substr(begin, end - begin);
      begin = end + 1;
      const std::optional<std::string_view> included = QuotedInclude(line);
      if (!included) {
        text_ += line;
        text_ += '\n';
      } else if (std::find(added_.begin(), added_.end(), *included) != added_.end()) {
        text_ += '\n';  // Keeps the numbers of the lines behind it.
      } else {
        MARLIN_RETURN_IF_ERROR(Add(*included, fmt::format("{}:{}", path, number)));
        text_ += fmt::format("#line {} \"{}\"\n", number + 1, path);
      }
    }
    return Status();
  }

  std::span<const KernelFile> files_;
  std::vector<std::string_view> added_;
  std::string text_;
};

}  // namespace

Result<std::string> JoinSource(std::span<const KernelFile> files, std::string_view path) {
  Joiner joiner(files);
  MARLIN_RETURN_IF_ERROR(joiner.Add(path, "the driver"));
  return joiner.Take();
}

}  // namespace marlin::metal
