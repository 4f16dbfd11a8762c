// Properties of devices that matter to measurements.
#pragma once

#include <string>

#include "marlin/device.h"
#include "ops/device/device.h"

namespace marlin::bench {

/// Whether times of the device of this name mean anything. Errors: kUnsupported for the simulator
/// of Metal.
inline Status CheckTimed(const std::string& name) {
  if (name != "metal-sim") return {};
  return Status(Code::kUnsupported,
                "metal-sim: a simulator has no speed; `metal-marlin metal-sim` counts bytes and "
                "operations of a kernel");
}

/// Calls per timed run. Where calls return before their work is done, many calls share one wait.
inline int64_t CallsOfRun(const Device& device) {
  constexpr int64_t kCalls = 32;
  return Internals::Impl(device).backend().calls_block() ? 1 : kCalls;
}

}  // namespace marlin::bench
