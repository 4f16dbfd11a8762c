// The tuning table of a device: what the library brings and what the user measured.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "marlin/status.h"
#include "plan/tuning_table.h"

namespace marlin {

struct Tuning {
  TuningTable table;
  std::string file;  ///< Of the user; empty: none.
};

/// Where `metal-marlin tune` writes, and where a file that nobody names is looked for:
/// metal-marlin/tuning.txt in XDG_CONFIG_HOME, else in .config of HOME. Empty where neither is set.
std::string DefaultTuningFile();

/// The file to read: `given`, else what METAL_MARLIN_TUNING says, else the default if it is there.
std::string ChooseTuningFile(const std::optional<std::string>& given);

/// A regular file of at most 16 MiB. Errors: kIo, kMalformedFile for a larger one.
Result<std::string> ReadTuningFile(const std::string& path);

/// The entries of `device` in the text `shipped`, then those of the user's file, which replace them
/// matrix by matrix. Errors: those of ReadTuningFile and ParseTuning.
Result<Tuning> LoadTuning(std::string_view shipped, const std::optional<std::string>& given,
                          std::string_view device);

}  // namespace marlin
