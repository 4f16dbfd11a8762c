#include "bench/moe/expert_trace.h"

#include <fmt/core.h>

#include <list>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/text_table.h"
#include "marlin/routing.h"

namespace marlin::bench {
namespace {

constexpr CachePolicy kPolicies[] = {CachePolicy::kLru, CachePolicy::kFrequency};

const char* PolicyName(CachePolicy policy) {
  return policy == CachePolicy::kLru ? "lru" : "frequency";
}

/// A replay, and its cache of experts without weights.
struct Run {
  TraceReplay replay;
  ExpertCache cache;

  Run(const TraceExperts& experts, CachePolicy policy, int64_t capacity)
      : replay{experts, policy, capacity, 0, {}}, cache({capacity, policy}) {}

  Status Take(const TokenRouting& token) {
    const auto load = [](const ExpertKey&) -> Result<Expert> { return Expert(); };
    for (const LayerRouting& layer : token) {
      std::vector<ExpertLease> used;
      for (const int32_t expert : layer.experts) {
        MARLIN_ASSIGN_OR_RETURN(used.emplace_back(),
                                cache.Get({layer.layer, expert}, replay.experts.bytes, load));
      }
    }
    ++replay.tokens;
    return {};
  }
};

}  // namespace

double TraceReplay::HitRate() const {
  const int64_t uses = statistics.hits + statistics.misses;
  return uses == 0 ? 0.0 : static_cast<double>(statistics.hits) / static_cast<double>(uses);
}

nlohmann::ordered_json TraceReplay::ToJson() const {
  return {{"op", "moe_trace"},
          {"format", FormatName(experts.format)},
          {"expert_bytes", experts.bytes},
          {"policy", PolicyName(policy)},
          {"capacity_bytes", capacity_bytes},
          {"tokens", tokens},
          {"hits", statistics.hits},
          {"misses", statistics.misses},
          {"hit_rate", HitRate()},
          {"evictions", statistics.evictions},
          {"fetched_bytes", statistics.loaded_bytes}};
}

Result<std::vector<TraceReplay>> ReplayTrace(const std::string& path,
                                             const std::vector<TraceExperts>& experts,
                                             int64_t capacity_bytes) {
  std::list<Run> runs;
  for (const TraceExperts& each : experts) {
    for (const CachePolicy policy : kPolicies) runs.emplace_back(each, policy, capacity_bytes);
  }
  const auto take = [&](const TokenRouting& token) -> Status {
    for (Run& run : runs) MARLIN_RETURN_IF_ERROR(run.Take(token));
    return {};
  };
  MARLIN_RETURN_IF_ERROR(ReadRoutingTrace(path, take));
  std::vector<TraceReplay> replays;
  for (Run& run : runs) {
    run.replay.statistics = run.cache.statistics();
    replays.push_back(run.replay);
  }
  return replays;
}

std::string TraceText(const std::vector<TraceReplay>& replays) {
  Table table({"format", "expert", "cache", "policy", "tokens", "hits", "misses", "hit rate",
               "evictions", "fetched"});
  for (const TraceReplay& replay : replays) {
    table.AddRow(
        {std::string(FormatName(replay.experts.format)), FormatBytes(replay.experts.bytes),
         FormatBytes(replay.capacity_bytes), PolicyName(replay.policy),
         std::to_string(replay.tokens), std::to_string(replay.statistics.hits),
         std::to_string(replay.statistics.misses), fmt::format("{:.1f} %", 100 * replay.HitRate()),
         std::to_string(replay.statistics.evictions), FormatBytes(replay.statistics.loaded_bytes)});
  }
  return table.ToString();
}

}  // namespace marlin::bench
