// The measurements behind `tune`: every candidate of one product, and which is the fastest.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/gpu.h"
#include "marlin/device.h"
#include "plan/tuning_table.h"

namespace marlin::bench {

/// Times the candidates of a product on a device whose memory is the host's, in turn; those that
/// take over four times as long as another only once. Where calls return before their work is done
/// a run is 32 of them and the wait for the last. Errors: those of ListCandidates and Gemm.
Result<std::vector<KernelTiming>> TimeCandidates(const Device& device,
                                                 const PreparedWeights& weights,
                                                 const BenchCase& bench);

/// Of the selectable ones, that which loses the least against the best, alone or in a chain,
/// wherever it loses more; among those within 1 % of each other, the planned one. Null when none is
/// selectable.
const KernelTiming* FastestOf(std::span<const KernelTiming> timings);

/// A table's entry for what was measured. Precondition: the name is one of ListCandidates.
TuningEntry EntryOf(const BenchCase& bench, const KernelTiming& timing);

/// A file that appears whole or not at all: written beside its place, renamed at the end, removed
/// when it is dropped before.
class WholeFile {
 public:
  /// Makes the folder and the file beside `path`, so that work is not done in vain. Errors: kIo.
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
