// The launches of operations on prepared weights: pure functions of the call.
#pragma once

#include <cstdint>
#include <span>

#include "backends/metal/gemm/prepared_strips.h"
#include "backends/metal/plan/launch_plan.h"
#include "backends/metal/runtime/driver.h"
#include "plan/gemm/backend.h"

namespace marlin::metal {

/// The function constants that prepared weights decide; for weights without zero points, their spec
/// alone.
FunctionConstants WeightConstants(const WeightsSpec& spec);
FunctionConstants WeightConstants(const PreparedStrips& weights);

/// The parameters of an expert's matrix of prepared weights, without m and strides.
kernels::Parameters WeightParameters(const PreparedStrips& weights, int64_t expert);

/// Bytes from the first element to the end of the last one.
int64_t ExtentBytes(int64_t rows, int64_t columns, int64_t stride, DType type,
                    int64_t column_stride = 1);

/// The launches of a GEMM, in order: clear partials, main loop, reduction with the epilogue.
using GemmLaunches = FixedVector<KernelLaunch, 3>;

/// The launches of a planned GEMM whose m and n are not 0.
GemmLaunches LaunchesOf(const LaunchPlan& plan, const GemmCall& call);

/// out[k, n] = the dequantized weights of an expert. k and n are not 0.
KernelLaunch DequantizeLaunch(const PreparedStrips& weights, int64_t expert,
                              const MutableTensorView& out);

/// Embedding lookup: out[i, k] = column ids[i] of the weights, dequantized. Without the ids, which
/// rows/look_up_launches.cc binds.
KernelLaunch LookUpLaunch(const PreparedStrips& weights, const MutableTensorView& out);

}  // namespace marlin::metal
