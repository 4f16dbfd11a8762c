// Runtime functions that the checks need beside the library: streams, to have several GEMMs in
// flight, and a memset.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "marlin/status.h"

namespace marlin::conformance {

/// Creates a stream on a backend's current device; null on the CPU, which has none. Errors:
/// kInternal in builds without the backend, kDeviceLost.
Result<std::shared_ptr<void>> MakeStream(std::string_view backend);

/// Sets bytes on a backend's current device and waits. Returns false, and sets nothing, where the
/// backend has no such call. Errors: kDeviceLost.
Result<bool> FillMemory(std::string_view backend, void* data, int value, int64_t bytes);

}  // namespace marlin::conformance
