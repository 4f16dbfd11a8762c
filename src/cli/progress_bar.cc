#include "cli/progress_bar.h"

#include <fmt/core.h>

#include <cstdio>

namespace marlin::cli {

ProgressBar::ProgressBar(const Console& console, std::string label)
    : shown_(console.interactive()),
      label_(std::move(label)),
      start_(std::chrono::steady_clock::now()) {}

ProgressBar::~ProgressBar() { Clear(); }

void ProgressBar::Update(int64_t done, int64_t total, std::string_view note) {
  if (!shown_ || total <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  constexpr int kWidth = 30;
  const double fraction = static_cast<double>(done) / static_cast<double>(total);
  const int filled = static_cast<int>(fraction * kWidth);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string left =
      fraction > 0.01 ? fmt::format("{:.0f} s left", elapsed * (1 - fraction) / fraction) : "";
  if (!note.empty()) left += fmt::format("{}{}", left.empty() ? "" : ", ", note);
  std::fprintf(stderr, "\r\x1b[K%s [%.*s%.*s] %3.0f %% %s", label_.c_str(), filled,
               "##############################", kWidth - filled, "..............................",
               100 * fraction, left.c_str());
  std::fflush(stderr);
}

void ProgressBar::Clear() {
  if (!drawn_) return;
  std::fprintf(stderr, "\r\x1b[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace marlin::cli
