// Matrices and Gram matrices times Hadamard blocks along k.
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// The largest size of Hadamard blocks up to `wanted` that divides k; 0 where there is none.
int64_t HadamardSizeFor(int64_t k, int64_t wanted);

/// H * dense as fp32 [k, n] in C order, of a matrix [k, n] that CheckDense accepts. Errors:
/// kOutOfMemory.
Result<AlignedBuffer> RotateRows(ThreadPool& pool, const TensorView& dense, int64_t size);

/// Turns `matrix` [k, k] into H * matrix * H: the Gram matrix of rotated inputs.
void RotateGram(ThreadPool& pool, int64_t k, int64_t size, std::vector<double>* matrix);

}  // namespace marlin
