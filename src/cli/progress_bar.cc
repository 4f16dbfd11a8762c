#include "cli/progress_bar.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace marlin::cli {
namespace {

using std::chrono::milliseconds;

constexpr double kFirstEstimate = 0.05;
constexpr int kProgressWidth = 30;

std::chrono::steady_clock::duration IntervalOf(const Console& console) {
  if (console.quiet()) return {};
  if (console.interactive()) return milliseconds(100);
  return milliseconds(console.verbose() ? 5000 : 30000);
}

}  // namespace

ProgressBar::ProgressBar(const Console& console, std::string label)
    : collected_(console.collected()),
      bar_(console.interactive()),
      interval_(IntervalOf(console)),
      label_(std::move(label)),
      // A bar shows at once, a line when work has taken long.
      last_(bar_ ? Clock::time_point() : start_) {}

ProgressBar::~ProgressBar() { Clear(); }

void ProgressBar::Update(int64_t done, int64_t total, std::string_view note) {
  if (collected_ != nullptr) {
    if (collected_->progress) collected_->progress(done, total);
    return;
  }
  if (interval_ == Clock::duration() || total <= 0) return;
  const Clock::time_point now = Clock::now();
  if (now - last_ < interval_) return;
  last_ = now;
  const double fraction = static_cast<double>(done) / static_cast<double>(total);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string left = TimeLeft(fraction, elapsed);
  if (!note.empty()) left += fmt::format(", {}", note);
  if (bar_) {
    const int filled = std::clamp(static_cast<int>(fraction * kProgressWidth), 0, kProgressWidth);
    fmt::print(stderr, "\r\x1b[K{} [{:#<{}}{:.<{}}] {:3.0f} %{}", label_, "", filled, "",
               kProgressWidth - filled, 100 * fraction, left);
    drawn_ = true;
  } else {
    fmt::print(stderr, "{}: {:.0f} %{}\n", label_, 100 * fraction, left);
  }
  std::fflush(stderr);
}

void ProgressBar::Clear() {
  if (!drawn_) return;
  std::fprintf(stderr, "\r\x1b[K");
  std::fflush(stderr);
  drawn_ = false;
}

std::string ClockTime(double seconds) {
  const int64_t whole = std::llround(std::clamp(seconds, 0.0, 1e9));
  const int64_t hours = whole / 3600;
  const int64_t minutes = whole / 60 % 60;
  if (hours == 0) return fmt::format("{}:{:02}", minutes, whole % 60);
  return fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60);
}

std::string TimeLeft(double fraction, double seconds) {
  if (fraction <= kFirstEstimate) return {};
  return fmt::format(", {} left", ClockTime(seconds * (1 - fraction) / fraction));
}

}  // namespace marlin::cli
