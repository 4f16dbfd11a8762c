// The launches that operations on prepared weights consist of: pure functions of the call.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/metal/driver.h"
#include "backends/metal/prepared_strips.h"
#include "plan/backend.h"

namespace marlin::metal {

/// A product whose m and n are not 0, one launch after the other.
std::vector<KernelLaunch> ProductLaunches(const GemmCall& call, const DeviceShape& device);

/// out[k, n] = an expert's weights; k and n are not 0.
KernelLaunch DequantizeLaunch(const PreparedStrips& weights, int64_t expert,
                              const MutableTensorView& out);

/// out[i, k] = column ids[i] of the weights.
KernelLaunch LookUpLaunch(const PreparedStrips& weights, const TensorView& ids,
                          const MutableTensorView& out);

}  // namespace marlin::metal
