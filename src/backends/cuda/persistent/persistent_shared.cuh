// Places in the shared memory of the persistent kernel.
#pragma once

#include "backends/cuda/common/device_code.cuh"
#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/persistent/persistent_layout.h"

namespace marlin::cuda {

/// The CTA's shared memory. Its parts are found from here again and again: the compiler knows the
/// address, and pointers would take registers that the GEMMs need.
MARLIN_DEVICE uint8_t* Memory() {
  extern __shared__ __align__(128) uint8_t memory[];
  return memory;
}

MARLIN_DEVICE FixedShared& Fixed() { return *reinterpret_cast<FixedShared*>(Memory()); }
/// With several rows.
MARLIN_DEVICE RowsScratch& FixedRows() {
  return *reinterpret_cast<RowsScratch*>(Memory() + sizeof(FixedShared));
}

/// The sums of the CTA's units.
MARLIN_DEVICE float* SumsOf(const PersistentArguments& args) {
  return reinterpret_cast<float*>(Memory() + args.shared.sums);
}
/// A warp's sums of a row of a unit.
template <PersistentForm kForm>
MARLIN_DEVICE float* WarpSumsOf(const PersistentArguments& args, int unit, int row) {
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  if constexpr (!IsRows(kForm)) {
    return SumsOf(args) + (unit * kPersistentWarps + warp) * kStripOutputs;
  } else {
    // See ScheduledUnit::first_warp.
    return SumsOf(args) + ((unit + warp) * args.rows + row) * kRowSumFloats;
  }
}

}  // namespace marlin::cuda
