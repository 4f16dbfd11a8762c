// A progress bar on stderr.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "cli/console.h"

namespace marlin::cli {

/// Redraws one line at most ten times a second and erases it at the end; does nothing when stderr
/// is not a terminal. One thread at a time.
class ProgressBar {
 public:
  ProgressBar(const Console& console, std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// `note` follows the time that is left.
  void Update(int64_t done, int64_t total, std::string_view note = {});
  /// Erases the line.
  void Clear();

 private:
  bool shown_;
  bool drawn_ = false;
  std::string label_;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace marlin::cli
