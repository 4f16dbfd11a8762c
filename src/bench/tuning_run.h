// Timing of all candidates of one GEMM, and selection of the fastest: the core of `tune`.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/gpu.h"
#include "marlin/device.h"
#include "plan/gemm/tuning_table.h"

namespace marlin::bench {

/// Times the candidates of a GEMM on a device whose memory is the host's, in turn; a candidate that
/// takes over four times as long as another is timed only once. Where calls return before their
/// work is done, a run is 32 calls and the wait for the last. Errors: from ListCandidates and
/// Gemm.
Result<std::vector<KernelTiming>> TimeCandidates(const Device& device,
                                                 const PreparedWeights& weights,
                                                 const BenchCase& bench);

/// The selectable candidate with the least loss against the best time, where its loss is the larger
/// of the isolated and the back-to-back one; the planned candidate when it is within 1 % of that.
/// Null when none is selectable.
const KernelTiming* FastestOf(std::span<const KernelTiming> timings);

/// The tuning table entry of a measurement. Precondition: the name is one of ListCandidates.
TuningEntry EntryOf(const BenchCase& bench, const KernelTiming& timing);

/// A file that is replaced atomically: written next to its final path, renamed by Finish, and
/// removed by the destructor otherwise.
class WholeFile {
 public:
  /// Makes the folder and the file next to `path`, so that errors come before the measurements.
  /// Errors: kIo.
  static Result<WholeFile> Create(const std::string& path);
  WholeFile(WholeFile&& other) noexcept;
  WholeFile& operator=(WholeFile&&) = delete;
  ~WholeFile();

  /// Errors: kIo.
  Status Finish(const std::string& text);

 private:
  WholeFile(std::string path, std::string partial)
      : path_(std::move(path)), partial_(std::move(partial)) {}

  std::string path_;
  std::string partial_;  ///< Empty once renamed.
};

}  // namespace marlin::bench
