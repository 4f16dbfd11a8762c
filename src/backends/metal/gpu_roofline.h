// The ceilings of a GPU, measured: what memory delivers, what the matrix units multiply, and what a
// call costs. Must not know products or who compares them.
#pragma once

#include <cstdint>

#include "backends/metal/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// Memory to read from, larger than the caches, and the launches of kernels/roofline.metal.
class GpuRoofline {
 public:
  /// Beyond the system-level cache of 8 to 96 MB.
  static constexpr int64_t kReadBytes = int64_t{512} << 20;
  /// Launches of one measurement, so that waiting for the last one hardly counts.
  static constexpr int kReadPasses = 4;
  /// Products that a simdgroup of MatrixFlops adds to each of its sums; milliseconds.
  static constexpr int kMatrixSteps = 2048;

  /// The driver must outlive this. `read_bytes` is rounded down to whole threadgroups, of which
  /// there is at least one. Errors: kOutOfMemory, those of the driver.
  static Result<GpuRoofline> Make(Driver& driver, int64_t read_bytes = kReadBytes,
                                  int matrix_steps = kMatrixSteps);

  int64_t read_bytes() const { return read_bytes_; }

  /// Seconds to read read_bytes() once, the mean of kReadPasses. Errors: of the driver.
  Result<double> ReadSeconds();
  /// FLOP/s of fp32 products of 8x8 matrices, all cores. Errors: of the driver.
  Result<double> MatrixFlops();
  /// Seconds of a call that does nothing, among others. Errors: of the driver.
  Result<double> CallSeconds();

  /// What the last reading and the last multiplication wrote, one number for each thread: the sum
  /// (modulo 2^32) of the words that it read, of 0, 1, 2, ... in all, and of its sums of products.
  const uint32_t* read_sums() const { return sums_.get(); }
  const float* matrix_sums() const { return matrix_sums_.get(); }
  int64_t read_threads() const;
  int64_t matrix_threads() const;

 private:
  GpuRoofline(Driver& driver, int64_t read_bytes, int matrix_steps)
      : driver_(&driver), read_bytes_(read_bytes), matrix_steps_(matrix_steps) {}
  KernelLaunch ReadLaunch(int64_t threadgroups) const;
  KernelLaunch MatrixLaunch() const;
  /// Seconds of one of `calls` calls of the launch, from the first one's start to the last one's
  /// end.
  Result<double> Seconds(const KernelLaunch& launch, int calls) const;

  Driver* driver_;
  int64_t read_bytes_;
  int matrix_steps_;
  DriverMemory<uint32_t> data_;  ///< 0, 1, 2, ...
  DriverMemory<uint32_t> sums_;
  DriverMemory<float> matrix_inputs_;
  DriverMemory<float> matrix_sums_;
};

}  // namespace marlin::metal
