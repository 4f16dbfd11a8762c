// Whether a kernel that --kernel names can be measured.
#pragma once

#include <string>

#include "bench/gemm.h"
#include "marlin/device.h"

namespace marlin::cli {

/// Refuses the name of a kernel that the device lacks. Errors: kInvalidArgument naming --kernel and
/// the kernels of the device.
Status CheckKernelName(const Device& device, const std::string& kernel);

/// Refuses a case that its kernel cannot run, before the machine is measured and weights beyond the
/// caches are made: it plans with a single matrix. Errors: as PlanGemm, naming --kernel.
Status CheckKernelRuns(const Device& device, bench::BenchCase bench);

}  // namespace marlin::cli
