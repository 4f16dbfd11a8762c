// Streams to have several products under way at once.
#pragma once

#include <memory>
#include <string_view>

#include "marlin/status.h"

namespace marlin::conformance {

/// A new stream of a backend's current device; null on the CPU, which has none. Errors:
/// kInternal in builds without the backend, kDeviceLost.
Result<std::shared_ptr<void>> MakeStream(std::string_view backend);

}  // namespace marlin::conformance
