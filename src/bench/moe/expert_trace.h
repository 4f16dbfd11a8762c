// Replay of a routing trace through the policies of ExpertCache.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "marlin/expert_cache.h"
#include "marlin/format.h"
#include "marlin/status.h"

namespace marlin::bench {

/// Experts of one format, all of one size.
struct TraceExperts {
  Format format = Format::kFp4E2M1;
  int64_t bytes = 0;  ///< Each expert's.
};

struct TraceReplay {
  TraceExperts experts;
  CachePolicy policy = CachePolicy::kLru;
  int64_t capacity_bytes = 0;
  int64_t tokens = 0;
  ExpertCacheStatistics statistics;

  double HitRate() const;
  /// One row of "results".
  nlohmann::ordered_json ToJson() const;
};

/// Replays a trace for every format, with every policy. The experts that a token selects in a layer
/// are in use at once. Errors: from ReadRoutingTrace and ExpertCache::Get.
Result<std::vector<TraceReplay>> ReplayTrace(const std::string& path,
                                             const std::vector<TraceExperts>& experts,
                                             int64_t capacity_bytes);

/// A table of results.
std::string TraceText(const std::vector<TraceReplay>& replays);

}  // namespace marlin::bench
