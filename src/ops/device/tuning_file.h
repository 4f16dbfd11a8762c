// The tuning table of a device: the shipped entries and the user's measurements.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "marlin/status.h"
#include "plan/gemm/tuning_table.h"

namespace marlin {

struct Tuning {
  TuningTable table;
  std::string file;  ///< The user's; empty: none.
};

/// The file that `metal-marlin tune` writes, and that is read when no other is named:
/// metal-marlin/tuning.txt in XDG_CONFIG_HOME, else in .config of HOME. Empty if neither is set.
std::string DefaultTuningFile();

/// The file to read: `given`, else the one METAL_MARLIN_TUNING names, else the default if it
/// exists.
std::string ChooseTuningFile(const std::optional<std::string>& given);

/// Reads a regular file of at most 16 MiB. Errors: kIo, kMalformedFile for a larger one.
Result<std::string> ReadTuningFile(const std::string& path);

/// The entries of `device` in the text `shipped`, then of the user's file, which override
/// them per matrix. Errors: see ReadTuningFile and ParseTuning.
Result<Tuning> LoadTuning(std::string_view shipped, const std::optional<std::string>& given,
                          std::string_view device);

}  // namespace marlin
