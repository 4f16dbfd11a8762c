// The findings of `doctor`: a line of its table each.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"

namespace marlin::cli {

/// The headings of the table.
inline constexpr const char* kMachineGroup = "This machine";
inline constexpr const char* kGpuGroup = "GPUs";
inline constexpr const char* kSettingsGroup = "Settings";
inline constexpr const char* kPythonGroup = "Python package";

/// Less free memory than this many bytes is a warning.
inline constexpr int64_t kLittleMemory = int64_t{1} << 30;

struct Finding {
  enum class State : uint8_t {
    kOk,
    kWarning,  ///< Works, but not as well as it could, or not as its user may believe.
    kMissing,  ///< Is not there, and nothing asked for it.
    kBroken,   ///< Was asked for, or is needed by all commands, and does not work.
  };

  std::string group;  ///< The heading: "GPUs".
  std::string name;
  State state = State::kOk;
  std::string found;
  std::string advice = {};  ///< Names what to do; empty where nothing is to be done.
};

/// The message of an error without the name of the device that it begins with.
std::string ReasonOf(const Status& status, std::string_view name);

/// "ok", "warning", "missing" or "broken".
std::string_view StateName(Finding::State state);

/// The table, and a line that counts.
std::string FindingsText(std::span<const Finding> findings);

/// {"ok": ..., "findings": [...]}; ok unless one is broken.
nlohmann::ordered_json FindingsDocument(std::span<const Finding> findings);

/// The findings of another program, an array as in the document. Errors: kInternal.
Result<std::vector<Finding>> ParseFindings(const std::string& json);

}  // namespace marlin::cli
