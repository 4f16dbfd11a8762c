// The driver that runs kernels on Apple GPUs.
#pragma once

#include <memory>

#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

struct AppleDriverOptions {
  bool for_list = false;  ///< No self-test: fragments are taken to be known.
};

/// The GPU of a Mac with Apple silicon. A stream is an MTL::CommandQueue* (id<MTLCommandQueue>) of
/// that GPU, or null for the driver's own queue. Memory from Allocate is shared with the GPU. Other
/// caller memory that a launch references must stay valid until Synchronize: whole pages are
/// mapped; anything else is copied before the launch and, where it was written, copied back, and
/// such calls block. Failed command buffers lose their results or, if the GPU takes no more work,
/// the device: every later call then returns the error. METAL_MARLIN_METAL_SELF_TEST=0 skips the
/// self-test, and OpenMetal then skips CheckKernels; "probe" skips only CheckKernels; "all" runs
/// both although an earlier process has. Errors: kUnsupported (no such GPU, no driver in this
/// build, kernels that do not compile, a failed self-test).
Result<std::unique_ptr<Driver>> OpenAppleDriver(const AppleDriverOptions& options = {});

}  // namespace marlin::metal
