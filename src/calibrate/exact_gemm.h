// Operands of fp32 GEMMs from host memory, for calibration.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/weights.h"

namespace marlin {

/// Grows a buffer to at least `numbers` floats; growing loses its contents. Errors:
/// kOutOfMemory.
Status GrowFloats(const Device& device, int64_t numbers, DeviceBuffer* buffer);

/// A matrix [k, n] in host memory as weights. Errors: as Prepare.
Result<PreparedWeights> PrepareFloats(const Device& device, const float* matrix, int64_t k,
                                      int64_t n);

/// Writes the transpose [columns, rows] of a matrix in host memory.
void TransposeFloats(ThreadPool& pool, const float* matrix, int64_t rows, int64_t columns,
                     float* out);

}  // namespace marlin
