#include "bench/timer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

namespace marlin::bench {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds that the threads of this process have spent runnable but not running. Linux only;
/// elsewhere always 0, so that every repetition counts as undisturbed.
double WaitingSeconds() {
  namespace fs = std::filesystem;
  double total = 0;
  std::error_code error;
  for (const auto& task : fs::directory_iterator("/proc/self/task", error)) {
    std::ifstream file(task.path() / "schedstat");
    double running = 0;
    double waiting = 0;
    if (file >> running >> waiting) total += waiting * 1e-9;
  }
  return total;
}

struct Sample {
  double seconds;
  bool undisturbed;
};

/// Runs of a body that make one repetition: at least 3 ms, so that waking parked threads, which
/// only happens between repetitions, does not count as the kernel's time.
int64_t RunsPerRepetition(const std::function<void(int64_t)>& body) {
  constexpr double kSeconds = 3e-3;
  body(0);  // Warm-up: pages, code, the pool's threads.
  const double start = Now();
  body(1);
  return std::clamp<int64_t>(static_cast<int64_t>(kSeconds / (Now() - start)), 1, 1000);
}

Sample TimeRepetition(const std::function<void(int64_t)>& body, int64_t repetition, int64_t runs) {
  const double waited = WaitingSeconds();
  const double start = Now();
  for (int64_t i = 0; i < runs; ++i) body(repetition * runs + i);
  const double seconds = Now() - start;
  const bool undisturbed = WaitingSeconds() - waited < std::max(0.01 * seconds, 30e-6);
  return {seconds / static_cast<double>(runs), undisturbed};
}

Timing Summarize(const std::vector<Sample>& samples) {
  std::vector<double> chosen;
  for (const Sample& sample : samples) {
    if (sample.undisturbed) chosen.push_back(sample.seconds);
  }
  const auto undisturbed = static_cast<int64_t>(chosen.size());
  if (undisturbed < 5) {
    chosen.clear();
    for (const Sample& sample : samples) chosen.push_back(sample.seconds);
  }
  Timing timing = SummarizeSeconds(std::move(chosen));
  timing.repetitions = static_cast<int64_t>(samples.size());
  timing.undisturbed = undisturbed;
  return timing;
}

}  // namespace

Stopwatch::Stopwatch() : start_(Now()) {}

double Stopwatch::Seconds() const { return Now() - start_; }

Timing PerCall(Timing timing, int64_t calls) {
  for (double* seconds : {&timing.median, &timing.p10, &timing.p90}) {
    *seconds /= static_cast<double>(calls);
  }
  return timing;
}

Timing SummarizeSeconds(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double fraction) {
    return seconds[static_cast<size_t>(
        std::lround(fraction * static_cast<double>(seconds.size() - 1)))];
  };
  const auto count = static_cast<int64_t>(seconds.size());
  return {at(0.5), at(0.1), at(0.9), count, count};
}

std::vector<Timing> MeasureTogether(const std::vector<std::function<void(int64_t)>>& bodies,
                                    const TimingOptions& options) {
  std::vector<std::vector<Sample>> samples(bodies.size());
  std::vector<int64_t> runs;
  runs.reserve(bodies.size());
  for (const auto& body : bodies) runs.push_back(RunsPerRepetition(body));
  const double start = Now();
  for (int64_t i = 1;; ++i) {
    bool enough = true;
    for (size_t b = 0; b < bodies.size(); ++b) {
      samples[b].push_back(TimeRepetition(bodies[b], i, runs[b]));
      const auto undisturbed = std::count_if(samples[b].begin(), samples[b].end(),
                                             [](const Sample& s) { return s.undisturbed; });
      enough = enough && undisturbed >= options.min_undisturbed;
    }
    const double elapsed = Now() - start;
    if (i >= 3 && elapsed > options.max_seconds) break;
    if (enough && elapsed > options.min_seconds) break;
  }
  std::vector<Timing> timings;
  timings.reserve(samples.size());
  for (const auto& body_samples : samples) timings.push_back(Summarize(body_samples));
  return timings;
}

Timing Measure(const std::function<void(int64_t)>& body, const TimingOptions& options) {
  return MeasureTogether({body}, options).front();
}

}  // namespace marlin::bench
