#include "text/hub_name.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

#include "base/printable.h"

namespace marlin {
namespace {

constexpr size_t kMostNameBytes = 96;
/// Names with these suffixes are files.
constexpr std::array<std::string_view, 5> kFileSuffixes = {".safetensors", ".gguf", ".onnx",
                                                           ".json", ".prepared"};

bool IsLetterOrDigit(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

/// The Hub's rule for the name of a user or a model.
bool IsHubWord(std::string_view word) {
  if (word.empty() || word.size() > kMostNameBytes) return false;
  if (!IsLetterOrDigit(word.front()) || word.back() == '-' || word.back() == '.') return false;
  if (word.find("--") != std::string_view::npos || word.find("..") != std::string_view::npos) {
    return false;
  }
  return std::all_of(word.begin(), word.end(),
                     [](char c) { return IsLetterOrDigit(c) || c == '-' || c == '_' || c == '.'; });
}

/// Whether text is a relative path of printable characters that stays in its folder.
bool IsInside(std::string_view path) {
  const bool printable =
      std::all_of(path.begin(), path.end(), [](char c) { return c > ' ' && c < '\x7F'; });
  return !path.empty() && printable && path.front() != '/' &&
         path.find("..") == std::string_view::npos && path.find('\\') == std::string_view::npos;
}

bool IsFileName(std::string_view name) {
  return std::any_of(kFileSuffixes.begin(), kFileSuffixes.end(),
                     [name](std::string_view suffix) { return name.ends_with(suffix); });
}

}  // namespace

std::optional<HubName> ParseHubName(std::string_view text) {
  HubName name;
  std::string_view rest = text;
  if (const size_t colon = rest.find(':'); colon != std::string_view::npos) {
    name.file = rest.substr(colon + 1);
    if (!IsInside(name.file)) return std::nullopt;
    rest = rest.substr(0, colon);
  }
  if (const size_t at = rest.find('@'); at != std::string_view::npos) {
    name.revision = rest.substr(at + 1);
    if (!IsInside(name.revision)) return std::nullopt;
    rest = rest.substr(0, at);
  }
  name.repository = rest;
  const size_t slash = rest.find('/');
  if (slash == std::string_view::npos || IsFileName(rest)) return std::nullopt;
  if (!IsHubWord(rest.substr(0, slash)) || !IsHubWord(rest.substr(slash + 1))) return std::nullopt;
  return name;
}

Result<std::string> ResolveModel(const ModelRequest& request, const ModelResolver& resolver) {
  std::error_code ignored;
  // A link that leads nowhere is a path, too.
  const std::filesystem::file_status status =
      std::filesystem::symlink_status(request.name, ignored);
  if (std::filesystem::exists(status) || !ParseHubName(request.name)) return request.name;
  if (resolver) return resolver(request);
  return Status(Code::kIo, fmt::format("{}: no such file or directory; models of the Hugging Face "
                                       "Hub need the command of the Python package",
                                       Printable(request.name)));
}

}  // namespace marlin
