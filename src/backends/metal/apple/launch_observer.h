// For a test's stand-in for a GPU, which learns more of launches than Metal's calls: the bytes that
// each declares, which Metal does not ask for.
#pragma once

#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

/// Called before the dispatch of a launch is encoded, on the same thread. Null outside of tests.
using LaunchObserver = void (*)(const KernelLaunch& launch);
LaunchObserver& TheLaunchObserver();

}  // namespace marlin::metal
