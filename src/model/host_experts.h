// Experts of a model that stay in the host's memory, where the CPU computes them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "marlin/device.h"

namespace marlin {

/// Which experts of a model stay on the host.
struct HostExperts {
  std::optional<Device> host;                   ///< The CPU; none if no expert stays there.
  std::map<int64_t, std::vector<bool>> layers;  ///< By layer with experts: whether each stays.
  int64_t count = 0;                            ///< Experts on the host, of all layers.
  int64_t bytes = 0;                            ///< Their bytes, as stored.

  bool Has(int64_t layer, int64_t expert) const {
    const auto found = layers.find(layer);
    return found != layers.end() && found->second[static_cast<size_t>(expert)];
  }
};

}  // namespace marlin
