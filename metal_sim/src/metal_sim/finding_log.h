// Collects findings: one entry per kind and pair of sites, with a count. Must not know
// threads or buffers; the reporting code writes the text.
#pragma once

#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

#include "metal_sim/launch.h"

namespace metal_sim {

class FindingLog {
 public:
  /// Findings beyond this many different ones are dropped: the first ones explain the rest.
  static constexpr size_t kMostFindings = 1000;

  /// Counts a finding, and returns whether it is a new one that wants a text: call Describe next.
  bool Count(FindingKind kind, const void* site, const void* other_site);
  /// Sets the text of the finding that was counted last.
  void Describe(std::string text) { findings_.back().text = std::move(text); }

  std::vector<Finding> Take() { return std::move(findings_); }

 private:
  struct Key {
    FindingKind kind;
    const void* site;
    const void* other_site;
    bool operator==(const Key& other) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const;
  };

  std::vector<Finding> findings_;
  std::unordered_map<Key, size_t, Hash> index_;
};

}  // namespace metal_sim
