// The compute capability whose code a device runs, which is not always its own: a build has code
// for some capabilities, and the driver takes the latest that the device can run.
#pragma once

#include "backends/cuda/plan/device_refusal.h"

namespace marlin::cuda {

/// The capability times ten that the code of the current device was compiled for (80 on a GPU of
/// 8.6 or of 9.0 in a build for 8.0 alone); 0: this build has no code for the device.
int DeviceCode();

/// Why DeviceCode() is 0.
struct NoCode {
  const char* error;  ///< CUDA's words.
  LacksCode lacks;
};
NoCode WhyNoCode();

/// The capabilities of this build, for messages: "8.0, 9.0a, 10.0 with PTX".
const char* BuiltCodes();

}  // namespace marlin::cuda
