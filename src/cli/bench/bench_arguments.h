// Options that several commands of bench share.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "bench/timer.h"
#include "cli/arguments/arguments.h"
#include "cli/arguments/device_argument.h"
#include "cli/console.h"
#include "marlin/gemm.h"

namespace marlin::cli {

/// The options of every command: --device, --threads, --max-time, --record, --commit.
struct BenchArguments {
  DeviceArgument device;
  std::optional<int64_t> threads;
  std::optional<double> max_time;
  std::string record;
  std::string commit;

  void Declare(ArgumentList& arguments);
  /// How long to measure each case.
  bench::TimingOptions Timing() const;
  /// Prints the document with --json, otherwise the text; writes the document to --record. Errors:
  /// kIo.
  Status Report(Console& console, const nlohmann::ordered_json& document,
                const std::string& text) const;
};

/// How GEMMs are computed: --accuracy, --batch-invariant.
struct GemmArguments {
  std::string accuracy = "default";
  bool batch_invariant = false;

  void Declare(ArgumentList& arguments);
  /// Errors: kInvalidArgument naming the option.
  Result<GemmOptions> Options() const;
};

}  // namespace marlin::cli
