// The progress of long work on stderr.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "cli/console.h"

namespace marlin::cli {

/// A bar on a terminal, redrawn at most ten times a second and erased at the end. Elsewhere, as in
/// the log of a job, a line every 30 seconds, or every 5 with --verbose. Nothing with --quiet. One
/// thread at a time. Inside another program, its callback hears of all progress.
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
  using Clock = std::chrono::steady_clock;

  CollectedOutput* const collected_;  ///< Null in a program of its own.
  const bool bar_;
  const Clock::duration interval_;  ///< Between two drawings or lines; 0: none.
  bool drawn_ = false;
  std::string label_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_;
};

/// "0:45", "1:12:30".
std::string ClockTime(double seconds);

/// ", 1:12:30 left", from the part that is done and the time that it took; empty for the first 5 %,
/// while estimates vary too much.
std::string TimeLeft(double fraction, double seconds);

}  // namespace marlin::cli
