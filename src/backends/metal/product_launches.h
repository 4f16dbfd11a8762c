// The launches that operations on prepared weights consist of: pure functions of the call.
#pragma once

#include <cstdint>
#include <span>

#include "backends/metal/driver.h"
#include "backends/metal/launch_plan.h"
#include "backends/metal/prepared_strips.h"
#include "plan/backend.h"

namespace marlin::metal {

/// The launches of a GEMM, one after the other: cleared sums, the products, the epilogue.
using GemmLaunches = FixedVector<KernelLaunch, 3>;

/// A GEMM whose m and n are not 0, as planned.
GemmLaunches LaunchesOf(const LaunchPlan& plan, const GemmCall& call);

/// out[k, n] = an expert's weights; k and n are not 0.
KernelLaunch DequantizeLaunch(const PreparedStrips& weights, int64_t expert,
                              const MutableTensorView& out);

/// out[i, k] = column ids[i] of the weights.
KernelLaunch LookUpLaunch(const PreparedStrips& weights, const TensorView& ids,
                          const MutableTensorView& out);

}  // namespace marlin::metal
