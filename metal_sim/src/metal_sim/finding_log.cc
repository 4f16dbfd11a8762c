#include "metal_sim/finding_log.h"

#include <functional>

namespace metal_sim {

const char* FindingKindName(FindingKind kind) {
  switch (kind) {
    case FindingKind::kRace:
      return "race";
    case FindingKind::kOutOfBounds:
      return "out of bounds";
    case FindingKind::kUninitialisedRead:
      return "uninitialised read";
    case FindingKind::kDivergentBarrier:
      return "divergent barrier";
    case FindingKind::kDivergentCollective:
      return "divergent collective";
    case FindingKind::kDeadlock:
      return "deadlock";
    case FindingKind::kReadOnlyWrite:
      return "write to read-only memory";
    case FindingKind::kWildAccess:
      return "wild access";
    case FindingKind::kForeignThreadgroupMemory:
      return "another threadgroup's memory";
    case FindingKind::kThreadgroupMemoryLimit:
      return "threadgroup memory limit";
    case FindingKind::kUnsupportedOrder:
      return "unsupported memory order";
    case FindingKind::kUndefinedOperation:
      return "undefined operation";
  }
  return "unknown finding";
}

size_t FindingLog::Hash::operator()(const Key& key) const {
  const size_t sites = std::hash<const void*>()(key.site) * 31;
  return (sites + std::hash<const void*>()(key.other_site)) * 31 + static_cast<size_t>(key.kind);
}

bool FindingLog::Count(FindingKind kind, const void* site, const void* other_site) {
  const Key key{kind, site, other_site};
  const auto known = index_.find(key);
  if (known != index_.end()) {
    ++findings_[known->second].count;
    return false;
  }
  if (findings_.size() == kMostFindings) return false;
  index_.emplace(key, findings_.size());
  findings_.push_back(
      {.kind = kind, .text = {}, .count = 1, .site = site, .other_site = other_site});
  return true;
}

}  // namespace metal_sim
