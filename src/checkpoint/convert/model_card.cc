#include "checkpoint/convert/model_card.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/files/model_directory.h"
#include "marlin/version.h"

namespace marlin {
namespace {

constexpr std::string_view kFence = "---\n";
constexpr std::string_view kMark = "<!-- metal-marlin ";
constexpr std::string_view kMarkEnd = " -->\n";
constexpr size_t kMostSkipped = 20;
constexpr size_t kMostValueBytes = 100;
constexpr int64_t kMaxCardBytes = int64_t{1} << 20;

/// The last name of a path.
std::string LastName(std::string_view path) {
  while (path.ends_with('/')) path.remove_suffix(1);
  const std::string name(path.substr(path.rfind('/') + 1));  // npos + 1 is 0.
  return name.empty() || name == "." || name == ".." ? "model" : name;
}

/// Untrusted text as one line of Markdown.
std::string Escape(std::string_view text) {
  std::string escaped;
  for (const char c : Printable(text)) {
    if (std::string_view("\\`*_[]<>|#&").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

/// A character of a name of the Hub, and of the values that a header may keep.
bool IsPlain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
}

/// "ORG/NAME" if the text has that form.
std::optional<std::string> HubName(std::string_view text) {
  const size_t slash = text.find('/');
  const bool fits =
      slash != std::string_view::npos && slash > 0 && slash + 1 < text.size() &&
      text.size() <= kMostValueBytes && text.front() != '.' &&
      std::all_of(text.begin(), text.end(), [](char c) { return IsPlain(c) || c == '/'; }) &&
      text.find('/', slash + 1) == std::string_view::npos;
  return fits ? std::optional<std::string>(text) : std::nullopt;
}

/// The model's name on the Hub: from the path of its cache, or from config.json.
std::optional<std::string> BaseModel(const Checkpoint::Impl& source) {
  constexpr std::string_view kModels = "models--";
  const size_t end = source.path.rfind("/snapshots/");
  if (end != std::string::npos) {
    const size_t slash = source.path.rfind('/', end - 1);
    const std::string name = source.path.substr(slash + 1, end - slash - 1);
    const size_t dashes = name.find("--", kModels.size());
    if (name.starts_with(kModels) && dashes != std::string::npos) {
      const std::string hub = fmt::format(
          "{}/{}", name.substr(kModels.size(), dashes - kModels.size()), name.substr(dashes + 2));
      if (auto found = HubName(hub)) return found;
    }
  }
  const Json& config = source.config();
  const auto known = config.is_object() ? config.find("_name_or_path") : config.end();
  if (known == config.end() || !known->is_string()) return std::nullopt;
  return HubName(known->get<std::string>());
}

/// The text of the card in the directory of the source; empty if it has none, or one that is not
/// read: a link to another directory, or a file of more than a megabyte. Errors: kIo.
Result<std::string> SourceCard(Io& io, const Checkpoint::Impl& source) {
  const std::string name(kModelCardName);
  if (!source.is_directory) return std::string();
  const std::string path = JoinPath(source.path, name);
  MARLIN_ASSIGN_OR_RETURN(FileInfo info, io.StatLink(path));
  if (info.kind == FileKind::kLink) {
    if (!CheckModelFile(io, source.path, name).ok()) return std::string();
    MARLIN_ASSIGN_OR_RETURN(info, io.Stat(path));
  }
  if (info.kind != FileKind::kRegular || info.size > kMaxCardBytes) return std::string();
  return io.ReadText(path, kMaxCardBytes);
}

/// The lines "key: value" of the source's header that hold for its quantized weights, too, as far
/// as their values are plain words.
std::string KeptHeader(std::string_view card) {
  if (!card.starts_with(kFence)) return {};
  card.remove_prefix(kFence.size());
  std::map<std::string, std::string> kept;
  while (!card.empty() && !card.starts_with("---")) {
    const size_t end = std::min(card.find('\n'), card.size());
    const std::string_view line = card.substr(0, end);
    card.remove_prefix(std::min(end + 1, card.size()));
    constexpr std::array<std::string_view, 4> kKeys = {"language", "license", "license_name",
                                                       "pipeline_tag"};
    const size_t colon = line.find(": ");
    const std::string_view key = line.substr(0, std::min(colon, line.size()));
    if (std::find(kKeys.begin(), kKeys.end(), key) == kKeys.end()) continue;
    std::string_view value = colon == std::string_view::npos ? "" : line.substr(colon + 2);
    while (value.ends_with('\r') || value.ends_with(' ')) value.remove_suffix(1);
    if (value.empty() || value.size() > kMostValueBytes) continue;
    if (!std::all_of(value.begin(), value.end(), IsPlain)) continue;
    kept.emplace(key, value);
  }
  std::string text;
  for (const auto& [key, value] : kept) text += fmt::format("{}: {}\n", key, value);
  return text;
}

std::string Header(const Checkpoint::Impl& source, const ModelCard& card,
                   const std::string& source_card) {
  std::string text(kFence);
  if (const std::optional<std::string> base = BaseModel(source)) {
    text += fmt::format("base_model: {}\nbase_model_relation: quantized\n", *base);
  }
  text += fmt::format("library_name: {}\n", card.library) + KeptHeader(source_card);
  text += "tags:\n- metal-marlin\n";
  if (card.target != "metal-marlin") text += fmt::format("- {}\n", card.target);
  text += "- quantized\n";
  return text.append(kFence);
}

double Percent(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

/// A row for each format: how many modules have it, and how exact they are.
std::string Formats(const ModelCard& card) {
  struct Group {
    int64_t modules = 0;
    int64_t parameters = 0;
  };
  std::map<std::array<std::string, 3>, Group> groups;
  for (const CardModule& module : card.modules) {
    const WeightsSpec& spec = module.spec;
    std::string format = spec.group_size >= spec.k
                             ? fmt::format("{}/channel", FormatName(spec.format))
                             : fmt::format("{}/g{}", FormatName(spec.format), spec.group_size);
    if (spec.sparsity != Sparsity::kDense)
      format += fmt::format("/{}", SparsityName(spec.sparsity));
    if (spec.has_permutation) format += "/permuted";
    if (spec.has_input_scale) format += "/scaled";
    if (spec.input_hadamard > 0) format += fmt::format("/h{}", spec.input_hadamard);
    if (spec.super_group_size > 0) format += fmt::format("/super{}", spec.super_group_size);
    Group& group = groups[{format, std::string(ScaleTypeName(spec.scale_type)), module.values}];
    ++group.modules;
    group.parameters += spec.experts * spec.k * spec.n;
  }
  if (groups.empty()) return {};
  std::string text =
      "\n| format | scales | modules | parameters | values |\n|---|---|---:|---:|---|\n";
  for (const auto& [key, group] : groups) {
    text += fmt::format("| {} | {} | {} | {} | {} |\n", Escape(key[0]), Escape(key[1]),
                        group.modules, group.parameters, Escape(key[2]));
  }
  return text;
}

/// A list of tensors under a title; empty if there are none.
std::string Listed(std::string_view title, const std::vector<SkippedTensor>& tensors) {
  if (tensors.empty()) return {};
  std::string text = fmt::format("\n{}:\n\n", title);
  for (size_t i = 0; i < std::min(tensors.size(), kMostSkipped); ++i) {
    text += fmt::format("- {}: {}\n", Escape(tensors[i].name), Escape(tensors[i].reason));
  }
  if (tensors.size() > kMostSkipped) {
    text += fmt::format("- and {} more\n", tensors.size() - kMostSkipped);
  }
  return text;
}

}  // namespace

Result<std::string> ModelCardText(Io& io, const Checkpoint::Impl& source, const ModelCard& card) {
  MARLIN_ASSIGN_OR_RETURN(const std::string source_card, SourceCard(io, source));
  std::string text = Header(source, card, source_card);
  text += fmt::format("\n# {}\n\n", Escape(LastName(card.output)));
  text += fmt::format("Quantized weights of {}, written by metal-marlin {} in the format of {}.\n",
                      Escape(LastName(source.path)), Version(), Escape(card.target));
  text += fmt::format("\n| | |\n|---|---|\n| method | {} |\n", Escape(card.method));
  if (!card.recipe.empty()) text += fmt::format("| recipe | {} |\n", Escape(card.recipe));
  text += fmt::format("| parameters | {} |\n| quantized | {:.1f} % |\n", card.parameters,
                      Percent(card.quantized_parameters, card.parameters));
  text += fmt::format("| bits per weight, with scales | {:.3f} |\n| bytes | {} |\n",
                      Percent(card.bytes, card.parameters) * 8 / 100, card.bytes);
  text += Formats(card);
  text += Listed("Not quantized", card.skipped);
  text += Listed("Quantized with another method, for want of data", card.other_methods);
  if (!card.metrics.empty()) text += "\nMeasured:\n\n";
  for (const std::string& metric : card.metrics) text += fmt::format("- {}\n", Escape(metric));
  return text + fmt::format("\n{}{:016x}{}", kMark, ChecksumOf(text), kMarkEnd);
}

bool IsOwnCard(std::string_view text) {
  const size_t at = text.rfind(kMark);
  if (at == std::string_view::npos || at == 0) return false;
  const std::string_view made = text.substr(0, at - 1);  // Without the empty line.
  return text.substr(at) == fmt::format("{}{:016x}{}", kMark, ChecksumOf(made), kMarkEnd);
}

Result<std::string> CardToWrite(Io& io, const std::string& output, std::string made) {
  const std::string path = JoinPath(output, std::string(kModelCardName));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io.StatLink(path));
  if (info.kind != FileKind::kRegular) return made;
  MARLIN_ASSIGN_OR_RETURN(std::string found, io.ReadText(path, kMaxSideFileBytes));
  return IsOwnCard(found) ? made : found;
}

}  // namespace marlin
