// The driver that runs kernels on Apple's GPUs.
#pragma once

#include <memory>

#include "backends/metal/driver.h"

namespace marlin::metal {

/// The GPU of a Mac with Apple silicon. A stream is an MTL::CommandQueue* (id<MTLCommandQueue>) of
/// that GPU, or null for the driver's own. Memory of Allocate is shared with the GPU. Other memory
/// of the caller's that a launch names must stay until Synchronize: whole pages are mapped,
/// anything else is copied before the launch and, where it was written, back, and such calls block.
/// A failed command buffer loses the device: every later call returns its error.
/// MARLIN_METAL_SELF_TEST=0 leaves out the self-test (as OpenMetal leaves out CheckKernels; "probe"
/// leaves out that alone). Errors: kUnsupported (no such GPU, no driver in this build, kernels that
/// do not compile, a self-test that fails).
Result<std::unique_ptr<Driver>> OpenAppleDriver();

}  // namespace marlin::metal
