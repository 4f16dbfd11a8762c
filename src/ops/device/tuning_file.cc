#include "ops/device/tuning_file.h"

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "base/environment.h"
#include "base/macros.h"
#include "base/path_check.h"
#include "base/printable.h"
#include "base/read_file.h"

namespace marlin {
namespace {

constexpr int64_t kMostBytes = int64_t{16} << 20;

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
  if (const auto named = ReadEnvironment("METAL_MARLIN_TUNING")) return named->value;
  std::string path = DefaultTuningFile();
  std::error_code error;
  return !path.empty() && std::filesystem::exists(path, error) ? path : std::string();
}

Result<std::string> ReadTuningFile(const std::string& path) {
  MARLIN_RETURN_IF_ERROR(CheckPath(path).WithContext("tuning_file"));
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    return Status(Code::kIo, Printable(path) + ": no such tuning file");
  }
  return ReadFile(path, kMostBytes);
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
