// The Metal backend: Apple GPUs, and the simulator of them.
#pragma once

#include <memory>
#include <string_view>

#include "backends/metal/runtime/driver.h"
#include "plan/gemm/backend.h"

namespace marlin::metal {

/// Opens "metal" or "metal-sim". Errors: kUnsupported, with the reason why there is no such device.
Result<std::unique_ptr<Backend>> OpenMetal(std::string_view name);

/// Opens "metal" without testing it, to tell its properties: what the self-test decides is taken to
/// be as on the GPUs that the kernels are for. Errors: as OpenMetal.
Result<std::unique_ptr<Backend>> ListMetal();

/// A backend that runs on the given driver.
std::unique_ptr<Backend> MakeMetalBackend(std::unique_ptr<Driver> driver);

/// The backend's driver, valid as long as the backend. Precondition: it comes from OpenMetal or
/// MakeMetalBackend.
Driver& DriverOf(const Backend& backend);

}  // namespace marlin::metal
