// The Metal backend: Apple GPUs, and the simulator of them.
#pragma once

#include <memory>
#include <string_view>

#include "backends/metal/runtime/driver.h"
#include "plan/gemm/backend.h"

namespace marlin::metal {

/// Opens "metal" or "metal-sim". Errors: kUnsupported, with the reason why there is no such device.
Result<std::unique_ptr<Backend>> OpenMetal(std::string_view name);

/// A backend that runs on the given driver.
std::unique_ptr<Backend> MakeMetalBackend(std::unique_ptr<Driver> driver);

/// The backend's driver, valid as long as the backend. Precondition: it comes from OpenMetal or
/// MakeMetalBackend.
Driver& DriverOf(const Backend& backend);

}  // namespace marlin::metal
