// bench moe --trace: replays a routing trace through caches of experts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/moe/expert_trace.h"
#include "cli/arguments/arguments.h"

namespace marlin::cli {

/// --trace FILE and --cache SIZE.
class TraceArguments {
 public:
  void Declare(ArgumentList& arguments);
  bool given() const { return trace_.has_value(); }
  /// Errors: kInvalidArgument for --cache without --trace.
  Status Check() const;
  /// Precondition: given(). Errors: kInvalidArgument naming --cache, as bench::ReplayTrace.
  Result<std::vector<bench::TraceReplay>> Replay(
      const std::vector<bench::TraceExperts>& experts) const;

 private:
  std::optional<std::string> trace_;
  std::optional<std::string> cache_;
};

}  // namespace marlin::cli
