// The measured roofline of a GPU: memory bandwidth, matrix throughput and launch overhead. Must not
// know GEMMs or the benchmarks that use it.
#pragma once

#include <cstdint>

#include "backends/metal/runtime/driver.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A read buffer larger than the caches, and the launches of kernels/roofline.metal.
class GpuRoofline {
 public:
  /// Larger than the system-level cache of 8 to 96 MB.
  static constexpr int64_t kReadBytes = int64_t{512} << 20;
  /// Launches per measurement, so that the wait for the last one is negligible.
  static constexpr int kReadPasses = 4;
  /// Multiply-accumulates per accumulator fragment in MatrixFlops; takes milliseconds.
  static constexpr int kMatrixSteps = 2048;

  /// The driver must outlive this. `read_bytes` is rounded down to whole threadgroups, at least
  /// one. Errors: kOutOfMemory, as the driver.
  static Result<GpuRoofline> Make(Driver& driver, int64_t read_bytes = kReadBytes,
                                  int matrix_steps = kMatrixSteps);

  int64_t read_bytes() const { return read_bytes_; }

  /// Seconds to read read_bytes() once, the mean of kReadPasses. Errors: of the driver.
  Result<double> ReadSeconds();
  /// FLOP/s of fp32 8x8 matrix multiply-accumulates on all cores. Errors: of the driver.
  Result<double> MatrixFlops();
  /// Seconds per launch of an empty kernel, launched back-to-back. Errors: of the driver.
  Result<double> CallSeconds();

  /// Outputs of the last ReadSeconds and MatrixFlops, one per thread: the sum (modulo 2^32) of the
  /// words that it read (the buffer holds 0, 1, 2, ...), and the sum of its accumulators.
  const uint32_t* read_sums() const { return sums_.get(); }
  const float* matrix_sums() const { return matrix_sums_.get(); }
  int64_t read_threads() const;
  int64_t matrix_threads() const;

 private:
  GpuRoofline(Driver& driver, int64_t read_bytes, int matrix_steps)
      : driver_(&driver), read_bytes_(read_bytes), matrix_steps_(matrix_steps) {}
  KernelLaunch ReadLaunch(int64_t threadgroups) const;
  KernelLaunch MatrixLaunch() const;
  /// Mean seconds per launch over `calls` launches, from the first start to the last end.
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
