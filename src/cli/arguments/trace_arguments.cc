#include "cli/arguments/trace_arguments.h"

#include "base/errors.h"
#include "base/macros.h"
#include "marlin/expert_cache.h"

namespace marlin::cli {

void TraceArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--trace", &trace_, "FILE",
                   "Replays a routing trace through caches of experts instead of timing; needs "
                   "one --shape");
  arguments.Option("--cache", &cache_, "SIZE", "--trace: capacity of the caches; default 512MiB");
}

Status TraceArguments::Check() const {
  if (!cache_ || trace_) return {};
  return Invalid("--cache: needs --trace");
}

Result<std::vector<bench::TraceReplay>> TraceArguments::Replay(
    const std::vector<bench::TraceExperts>& experts) const {
  int64_t capacity = ExpertCacheOptions().capacity_bytes;
  if (cache_) {
    MARLIN_ASSIGN_OR_RETURN(capacity, ParseByteSize("--cache", *cache_));
  }
  return bench::ReplayTrace(*trace_, experts, capacity);
}

}  // namespace marlin::cli
