#include "ops/tuning_file.h"

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "base/macros.h"

namespace marlin {
namespace {

constexpr uintmax_t kMostBytes = uintmax_t{16} << 20;

Status Unreadable(const std::string& path, const std::string& why) {
  return Status(Code::kIo, path + ": " + why);
}

}  // namespace

std::string DefaultTuningFile() {
  constexpr const char* kPlace = "/metal-marlin/tuning.txt";
  const char* const config = std::getenv("XDG_CONFIG_HOME");
  if (config != nullptr && *config != '\0') return std::string(config) + kPlace;
  const char* const home = std::getenv("HOME");
  if (home != nullptr && *home != '\0') return std::string(home) + "/.config" + kPlace;
  return {};
}

std::string ChooseTuningFile(const std::optional<std::string>& given) {
  if (given) return *given;
  if (const char* named = std::getenv("METAL_MARLIN_TUNING"); named != nullptr) return named;
  std::string path = DefaultTuningFile();
  std::error_code error;
  return !path.empty() && std::filesystem::exists(path, error) ? path : std::string();
}

Result<std::string> ReadTuningFile(const std::string& path) {
  std::error_code error;
  // Anything else could make a reader wait for ever.
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return Unreadable(path, "no such tuning file");
  if (!std::filesystem::is_regular_file(status)) return Unreadable(path, "is not a regular file");
  const uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) return Unreadable(path, error.message());
  if (bytes > kMostBytes) {
    return Status(Code::kMalformedFile, path + ": expected at most " + std::to_string(kMostBytes) +
                                            " bytes of a tuning file, got " +
                                            std::to_string(bytes));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<size_t>(bytes), '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(bytes))) {
    return Unreadable(path, "cannot be read");
  }
  return text;
}

Result<Tuning> LoadTuning(std::string_view shipped, const std::optional<std::string>& given,
                          std::string_view device) {
  Tuning tuning;
  if (!shipped.empty()) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<TuningSection> sections,
                            ParseTuning(shipped, "the library's tuning table"));
    tuning.table.Add(sections, device);
  }
  tuning.file = ChooseTuningFile(given);
  if (tuning.file.empty()) return tuning;
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadTuningFile(tuning.file));
  MARLIN_ASSIGN_OR_RETURN(const std::vector<TuningSection> sections,
                          ParseTuning(text, tuning.file));
  tuning.table.Add(sections, device);
  return tuning;
}

}  // namespace marlin
