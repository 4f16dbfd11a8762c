// What the checks want of a device's runtime beside the library: streams to have several products
// under way at once, and memory set to a byte without a copy.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "marlin/status.h"

namespace marlin::conformance {

/// A new stream of a backend's current device; null on the CPU, which has none. Errors:
/// kInternal in builds without the backend, kDeviceLost.
Result<std::shared_ptr<void>> MakeStream(std::string_view backend);

/// Sets bytes of a backend's current device and waits; false where the backend has no call for it,
/// and nothing is set. Errors: kDeviceLost.
Result<bool> FillMemory(std::string_view backend, void* data, int value, int64_t bytes);

}  // namespace marlin::conformance
