// GEMMs in fp32 whose operands the host has, for calibration.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"

namespace marlin {

/// Makes a buffer of at least `numbers` floats; what it held is lost if it grows. Errors:
/// kOutOfMemory.
Status GrowFloats(const Device& device, int64_t numbers, DeviceBuffer* buffer);

/// A matrix [k, n] in host memory as weights. Errors: those of Prepare.
Result<PreparedWeights> PrepareFloats(const Device& device, const float* matrix, int64_t k,
                                      int64_t n);

/// Writes the transpose [columns, rows] of a matrix in host memory.
void TransposeFloats(ThreadPool& pool, const float* matrix, int64_t rows, int64_t columns,
                     float* out);

}  // namespace marlin
