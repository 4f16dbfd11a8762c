// Layers of a model that stay in the host's memory, where the CPU runs them.
#pragma once

#include <cstdint>
#include <optional>

#include "marlin/device.h"

namespace marlin {

/// Which layers of a model stay on the host: the first ones, with the embeddings, so that hidden
/// states cross to the device once.
struct HostLayers {
  std::optional<Device> host;  ///< The CPU; none if no layer stays there.
  int64_t count = 0;
  int64_t bytes = 0;  ///< Bytes that the device does not hold, as it would store them.
};

}  // namespace marlin
