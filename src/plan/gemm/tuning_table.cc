#include "plan/gemm/tuning_table.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <set>
#include <utility>

#include "base/macros.h"
#include "layout/weights_shapes.h"
#include "plan/gemm/kernel_name.h"

namespace marlin {
namespace {

constexpr std::string_view kFirstLine = "metal-marlin tuning 2";
constexpr std::string_view kVersion1 = "metal-marlin tuning 1";
constexpr std::string_view kAnyVersion = "metal-marlin tuning ";
constexpr std::array<std::string_view, 3> kOffsetNames = {"none", "zeros", "biases"};
constexpr int64_t kMostGroup = 128;

/// Quotes text of a file for a one-line message: bounded, printable ASCII.
std::string Quoted(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string quoted(text.substr(0, kMost));
  for (char& c : quoted) {
    if (c < ' ' || c > '~') c = '?';
  }
  return "'" + quoted + "'";
}

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

std::vector<std::string_view> Words(std::string_view line) {
  std::vector<std::string_view> words;
  for (line = Trimmed(line); !line.empty();) {
    const size_t end = std::min(line.find_first_of(" \t"), line.size());
    words.push_back(line.substr(0, end));
    line = Trimmed(line.substr(end));
  }
  return words;
}

/// The rest of a line that begins with a word; false for another line.
bool TakeWord(std::string_view word, std::string_view* line) {
  if (!line->starts_with(word) || line->size() == word.size()) return false;
  const std::string_view rest = line->substr(word.size());
  if (rest.front() != ' ' && rest.front() != '\t') return false;
  *line = Trimmed(rest);
  return true;
}

/// Reads the lines of one text; errors name the line.
class Parser {
 public:
  Parser(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  Result<std::vector<TuningSection>> Run() {
    std::string_view line;
    if (!NextLine(&line) || (line != kFirstLine && line != kVersion1)) {
      return line.starts_with(kAnyVersion)
                 ? Malformed(fmt::format("version {}, and this library reads 1 and 2: run "
                                         "metal-marlin tune again, or remove the file",
                                         Quoted(line.substr(kAnyVersion.size()))))
                 : Malformed(fmt::format("expected '{}', got {}", kFirstLine, Quoted(line)));
    }
    version_1_ = line == kVersion1;
    while (NextLine(&line)) MARLIN_RETURN_IF_ERROR(ParseLine(line));
    return std::move(sections_);
  }

 private:
  /// The next line that is neither blank nor a comment.
  bool NextLine(std::string_view* line) {
    *line = {};
    while (!text_.empty() && line->empty()) {
      const size_t end = std::min(text_.find('\n'), text_.size());
      *line = Trimmed(text_.substr(0, end));
      text_.remove_prefix(std::min(end + 1, text_.size()));
      ++number_;
      if (line->starts_with('#')) *line = {};
    }
    return !line->empty();
  }

  Status Malformed(std::string_view what) const {
    return Status(Code::kMalformedFile, fmt::format("{}: line {}: {}", file_, number_, what));
  }

  Status ParseLine(std::string_view line) {
    if (TakeWord("device", &line)) {
      sections_.emplace_back().device = line;
      seen_.clear();
      return Status();
    }
    if (sections_.empty()) return Malformed("expected a device, got " + Quoted(line));
    const std::vector<std::string_view> words = Words(line);
    if (words.front() == "measured") {
      if (words.size() > 3) return Malformed("expected a date and a commit, got " + Quoted(line));
      if (words.size() > 1) sections_.back().date = words[1];
      if (words.size() > 2) sections_.back().commit = words[2];
      return Status();
    }
    return ParseEntry(words);
  }

  Status ParseEntry(const std::vector<std::string_view>& words) {
    const size_t columns = version_1_ ? 9 : 12;
    if (words.size() != columns) {
      return Malformed(fmt::format(
          "expected format, group, {}activations, {}plain or gated, n, k, "
          "m, kernel and nanoseconds, got {} words",
          version_1_ ? "" : "scales, offsets, ", version_1_ ? "" : "output, ", words.size()));
    }
    TuningEntry entry;
    MARLIN_RETURN_IF_ERROR(version_1_ ? ParseVersion1Key(words, &entry.key)
                                      : ParseKey(words, &entry.key));
    const std::span<const std::string_view> rest = std::span(words).last(6);
    entry.key.gated = rest[0] == "gated";
    if (!entry.key.gated && rest[0] != "plain") {
      return Malformed("expected plain or gated, got " + Quoted(rest[0]));
    }
    MARLIN_RETURN_IF_ERROR(ParseNumber("n", rest[1], &entry.key.n));
    MARLIN_RETURN_IF_ERROR(ParseNumber("k", rest[2], &entry.key.k));
    MARLIN_RETURN_IF_ERROR(ParseNumber("m", rest[3], &entry.m));
    const Result<KernelName> name = ParseKernelName(rest[4]);
    if (!name.ok()) return Malformed("expected NAME or NAME@WIDTHxSPLITS, got " + Quoted(rest[4]));
    entry.kernel = name->kernel;
    entry.variant = name->variant;
    MARLIN_RETURN_IF_ERROR(ParseNumber("nanoseconds", rest[5], &entry.nanoseconds));
    if (!seen_.emplace(entry.key, entry.m).second) return Malformed("the same problem twice");
    sections_.back().entries.push_back(std::move(entry));
    return Status();
  }

  Status ParseFormatAndGroup(const std::vector<std::string_view>& words, TuningKey* key) const {
    const Result<Format> format = ParseFormat(words[0]);
    if (!format.ok()) return Malformed("unknown format " + Quoted(words[0]));
    key->format = *format;
    if (words[1] != "0") MARLIN_RETURN_IF_ERROR(ParseNumber("group", words[1], &key->group));
    if (key->group > kMostGroup || (key->group & (key->group - 1)) != 0) {
      return Malformed("group: expected 0 or a power of two up to 128, got " + Quoted(words[1]));
    }
    return Status();
  }

  Status ParseKey(const std::vector<std::string_view>& words, TuningKey* key) const {
    MARLIN_RETURN_IF_ERROR(ParseFormatAndGroup(words, key));
    const Result<ScaleType> scales = ParseScaleType(words[2]);
    if (!scales.ok()) return Malformed("unknown scales " + Quoted(words[2]));
    key->scales = *scales;
    const auto offsets = std::find(kOffsetNames.begin(), kOffsetNames.end(), words[3]);
    if (offsets == kOffsetNames.end()) {
      return Malformed("expected none, zeros or biases, got " + Quoted(words[3]));
    }
    key->offsets = static_cast<TuningKey::Offsets>(offsets - kOffsetNames.begin());
    MARLIN_RETURN_IF_ERROR(ParseType("activations", words[4], &key->activations));
    return ParseType("output", words[5], &key->output);
  }

  Status ParseVersion1Key(const std::vector<std::string_view>& words, TuningKey* key) const {
    MARLIN_RETURN_IF_ERROR(ParseFormatAndGroup(words, key));
    const bool zeros = GetFormatInfo(key->format).zero_point == ZeroPoint::kRequired;
    key->offsets = zeros ? TuningKey::Offsets::kZeros : TuningKey::Offsets::kNone;
    MARLIN_RETURN_IF_ERROR(ParseType("activations", words[2], &key->activations));
    key->output = key->activations;
    return Status();
  }

  Status ParseType(std::string_view what, std::string_view word, DType* type) const {
    for (const DType known : {DType::kBf16, DType::kF16, DType::kF32}) {
      if (word != DTypeName(known)) continue;
      *type = known;
      return Status();
    }
    return Malformed(fmt::format("unknown {} {}", what, Quoted(word)));
  }

  Status ParseNumber(std::string_view what, std::string_view word, int64_t* value) const {
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
    constexpr int64_t kMost = int64_t{1} << 48;
    if (error == std::errc() && end == word.data() + word.size() && *value > 0 && *value < kMost) {
      return Status();
    }
    return Malformed(fmt::format("{}: expected a number from 1 up, got {}", what, Quoted(word)));
  }

  std::string_view text_;
  std::string_view file_;
  bool version_1_ = false;
  int64_t number_ = 0;
  std::vector<TuningSection> sections_;
  std::set<std::pair<TuningKey, int64_t>> seen_;  ///< Keys and m of the last section.
};

std::string FormatEntry(const TuningEntry& entry) {
  const TuningKey& key = entry.key;
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {}\n", FormatName(key.format), key.group,
                     ScaleTypeName(key.scales), kOffsetNames[static_cast<size_t>(key.offsets)],
                     DTypeName(key.activations), DTypeName(key.output),
                     key.gated ? "gated" : "plain", key.n, key.k, entry.m,
                     ToString(entry.kernel, entry.variant), entry.nanoseconds);
}

/// A name on one line.
std::string OneLine(std::string_view text) {
  std::string line(Trimmed(text));
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line.empty() ? "unknown" : line;
}

}  // namespace

TuningKey TuningKey::Of(const GemmDesc& desc) {
  TuningKey key;
  key.format = desc.format;
  if (GetFormatInfo(desc.format).quantized) {
    key.group = SharedScaleRun(desc.group_size, desc.k, kMostGroup);
    key.scales = desc.scale_type;
  }
  key.offsets = desc.has_zeros    ? Offsets::kZeros
                : desc.has_biases ? Offsets::kBiases
                                  : Offsets::kNone;
  key.activations = desc.a_type;
  key.output = desc.c_type;
  key.gated = desc.gated;
  key.n = desc.n;
  key.k = desc.k;
  return key;
}

Result<std::vector<TuningSection>> ParseTuning(std::string_view text, std::string_view file) {
  return Parser(text, file).Run();
}

std::string FormatTuning(std::span<const TuningSection> sections) {
  std::string text(kFirstLine);
  text += '\n';
  for (const TuningSection& section : sections) {
    text += fmt::format("\ndevice {}\n", OneLine(section.device));
    if (!section.date.empty()) {
      text += fmt::format("measured {}{}{}\n", section.date, section.commit.empty() ? "" : " ",
                          section.commit);
    }
    text += "# format group scales offsets activations output gated n k m kernel nanoseconds\n";
    for (const TuningEntry& entry : section.entries) text += FormatEntry(entry);
  }
  return text;
}

void ReplaceTuning(TuningSection section, std::vector<TuningSection>& sections) {
  section.device = OneLine(section.device);
  std::set<TuningKey> keys;
  for (const TuningEntry& entry : section.entries) keys.insert(entry.key);
  for (TuningSection& old : sections) {
    if (old.device != section.device) continue;
    std::erase_if(old.entries, [&](const TuningEntry& entry) { return keys.contains(entry.key); });
  }
  std::erase_if(sections, [](const TuningSection& old) { return old.entries.empty(); });
  if (!section.entries.empty()) sections.push_back(std::move(section));
}

void TuningTable::Add(std::span<const TuningSection> sections, std::string_view device) {
  for (const TuningSection& section : sections) {
    if (section.device != OneLine(device)) continue;
    std::map<TuningKey, std::vector<TuningEntry>> added;
    for (const TuningEntry& entry : section.entries) added[entry.key].push_back(entry);
    for (auto& [key, entries] : added) {
      std::sort(entries.begin(), entries.end(),
                [](const TuningEntry& a, const TuningEntry& b) { return a.m < b.m; });
      entries_[key] = std::move(entries);
    }
  }
}

const TuningEntry* TuningTable::Find(const GemmDesc& desc) const {
  if (entries_.empty()) return nullptr;
  const auto found = entries_.find(TuningKey::Of(desc));
  if (found == entries_.end()) return nullptr;
  const std::vector<TuningEntry>& entries = found->second;
  const auto entry =
      std::lower_bound(entries.begin(), entries.end(), desc.m,
                       [](const TuningEntry& candidate, int64_t m) { return candidate.m < m; });
  return entry != entries.end() && entry->m < 2 * desc.m ? &*entry : nullptr;
}

int64_t TuningTable::size() const {
  int64_t size = 0;
  for (const auto& [key, entries] : entries_) size += static_cast<int64_t>(entries.size());
  return size;
}

}  // namespace marlin
