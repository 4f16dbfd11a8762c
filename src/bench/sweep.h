// Random GEMMs: how far from the roofline the kernels are over all problems, not only over the
// shapes that were tuned.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/split_mix64.h"
#include "bench/gemm.h"
#include "bench/progress.h"
#include "marlin/device.h"

namespace marlin::bench {

struct SweepOptions {
  int64_t seed = 1;
  int64_t count = 50;   ///< Problems.
  double seconds = 0;   ///< No problem begins later than this; 0: no limit.
  bool others = false;  ///< Also times the other kernels that can run a problem.
  GemmOptions gemm;     ///< Options of every problem.
  TimingOptions timing;
};

/// The problems of a sweep, the same on every machine: formats, groups, scale and activation types
/// uniform among those that can be combined; m up to 512, n and k up to 8192 log-uniform, half of n
/// and k multiples of 128.
class RandomCases {
 public:
  explicit RandomCases(int64_t seed) : random_(static_cast<uint64_t>(seed)) {}
  BenchCase Next();

 private:
  /// Uniform in [0, count).
  int64_t Below(int64_t count);
  /// Log-uniform in [1, most], rounded down.
  int64_t LogUniform(int64_t least, int64_t most);

  SplitMix64 random_;
};

struct SweepRow {
  BenchResult result;
  double fraction = 0;  ///< As RooflineFraction gives it.
  std::string fastest;  ///< The fastest other kernel, or empty.
  double lead = 0;      ///< Its time over the planned kernel's.
};

/// The quantiles of fractions that a sweep reports: least, 10, 25, 50, 75, 90 %, largest.
/// Precondition: not empty.
std::vector<double> Quantiles(std::vector<double> fractions);

class Sweep {
 public:
  /// Times the problems one after the other.
  /// Errors: from Prepare and Gemm.
  static Result<Sweep> Run(const Device& device, const ReadProbe& probe,
                           const MachineCeilings& ceilings, const SweepOptions& options,
                           const Progress& progress);

  const std::vector<SweepRow>& rows() const { return rows_; }
  /// The quantiles of all problems, of GEMVs and of larger ones, and the problems with the least
  /// fractions.
  std::string ToText() const;
  /// {"sweep", "distribution", "results"}; results in the order of the problems.
  nlohmann::ordered_json ToJson() const;

 private:
  /// The fractions of problems with m in [least_m, most_m].
  std::vector<double> Fractions(int64_t least_m, int64_t most_m) const;

  SweepOptions options_;
  std::vector<SweepRow> rows_;
};

}  // namespace marlin::bench
