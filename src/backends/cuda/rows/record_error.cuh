// Recording a wrong value in device memory.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

/// The first error to be recorded stays; `numbers` go into its message (value_errors.cc).
MARLIN_DEVICE void RecordError(const ErrorView& errors, ValueError error, int64_t a, int64_t b = 0,
                               int64_t c = 0) {
  if (atomicCAS(&errors.record->value_error, 0, static_cast<int>(error)) != 0) return;
  errors.record->numbers[0] = a;
  errors.record->numbers[1] = b;
  errors.record->numbers[2] = c;
  __threadfence_system();
  *errors.any = 1;
}

}  // namespace marlin::cuda
