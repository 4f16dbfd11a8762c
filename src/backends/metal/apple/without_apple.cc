// Builds without Apple's Metal: opening the device fails.
#include "backends/metal/apple/apple_driver.h"

namespace marlin::metal {

Result<std::unique_ptr<Driver>> OpenAppleDriver(const AppleDriverOptions& /*options*/) {
  return Status(Code::kUnsupported,
                "metal: this build has no driver for Apple GPUs (" MARLIN_METAL_WHY
                "); \"metal-sim\" runs their kernels in a simulator");
}

}  // namespace marlin::metal
