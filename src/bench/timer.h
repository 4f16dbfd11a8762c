// Timing on a shared machine: repetitions disturbed by other processes are told apart.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace marlin::bench {

/// Time since it was made.
class Stopwatch {
 public:
  Stopwatch();
  double Seconds() const;

 private:
  double start_;
};

/// Seconds per run. Undisturbed repetitions are those in which the threads of this process waited
/// for a processor less than 1 % of the time (or 30 us); where the system does not tell, all are.
struct Timing {
  double median = 0;
  double p10 = 0;
  double p90 = 0;
  int64_t repetitions = 0;
  int64_t undisturbed = 0;
};

/// Divides the timing of runs of `calls` calls by `calls`.
Timing PerCall(Timing timing, int64_t calls);

/// The summary of runs that were all undisturbed. Precondition: at least one.
Timing SummarizeSeconds(std::vector<double> seconds);

struct TimingOptions {
  double min_seconds = 0.4;
  double max_seconds = 4.0;
  int min_undisturbed = 15;
};

/// Runs body(i) with i = 0, 1, ... until there are enough undisturbed repetitions or time is up.
/// The figures are over the undisturbed ones when there are at least five, otherwise over all.
Timing Measure(const std::function<void(int64_t)>& body, const TimingOptions& options = {});

/// The same for several bodies in turn, one run of each per round, so that a change in the
/// machine's speed affects all of them equally.
std::vector<Timing> MeasureTogether(const std::vector<std::function<void(int64_t)>>& bodies,
                                    const TimingOptions& options = {});

}  // namespace marlin::bench
