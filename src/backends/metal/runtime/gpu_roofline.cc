#include "backends/metal/runtime/gpu_roofline.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/macros.h"

namespace marlin::metal {
namespace {

using kernels::kLanes;
using kernels::kRooflineSums;
using kernels::kRooflineVectors;

constexpr uint32_t kRooflineThreads = 256;
constexpr int kReadRounds = 16;
constexpr int64_t kWordBytes = sizeof(uint32_t);
constexpr int64_t kVectorBytes = 4 * kWordBytes;
constexpr int64_t kGroupVectors = int64_t{kReadRounds} * kRooflineVectors * kRooflineThreads;
constexpr int64_t kGroupBytes = kGroupVectors * kVectorBytes;

/// Threadgroups per core of the matrix benchmark: more simdgroups than a core keeps resident.
constexpr int64_t kMatrixGroupsOfCore = 8;
/// FLOPs of one 8x8x8 matrix multiply-accumulate.
constexpr double kMatrixOperations = 2.0 * 8 * 8 * 8;

constexpr int kMatrixCalls = 4;
constexpr int kEmptyCalls = 32;

}  // namespace

Result<GpuRoofline> GpuRoofline::Make(Driver& driver, int64_t read_bytes, int matrix_steps) {
  const int64_t threadgroups = std::max<int64_t>(read_bytes / kGroupBytes, 1);
  GpuRoofline roofline(driver, threadgroups * kGroupBytes, matrix_steps);
  MARLIN_ASSIGN_OR_RETURN(roofline.data_,
                          AllocateMemory<uint32_t>(driver, roofline.read_bytes_ / kWordBytes));
  MARLIN_ASSIGN_OR_RETURN(roofline.sums_,
                          AllocateMemory<uint32_t>(driver, roofline.read_threads()));
  MARLIN_ASSIGN_OR_RETURN(roofline.matrix_sums_,
                          AllocateMemory<float>(driver, roofline.matrix_threads()));
  MARLIN_ASSIGN_OR_RETURN(roofline.matrix_inputs_,
                          AllocateMemory<float>(driver, 2 + kRooflineSums));
  std::iota(roofline.data_.get(), roofline.data_.get() + roofline.read_bytes_ / kWordBytes, 0U);
  // Integers whose sums are exact in fp32 for up to some 10^5 steps.
  float* const inputs = roofline.matrix_inputs_.get();
  inputs[0] = 1;
  inputs[1] = -1;
  for (int i = 0; i < kRooflineSums; ++i) inputs[2 + i] = static_cast<float>(i);
  return roofline;
}

int64_t GpuRoofline::read_threads() const { return read_bytes_ / kGroupBytes * kRooflineThreads; }
int64_t GpuRoofline::matrix_threads() const {
  return std::max(driver_->Shape().cores, 1) * kMatrixGroupsOfCore * kRooflineThreads;
}

KernelLaunch GpuRoofline::ReadLaunch(int64_t threadgroups) const {
  KernelLaunch launch;
  launch.source = "roofline.metal";
  launch.function = "marlin_roofline_read";
  launch.parameters.input_stride = kGroupVectors;
  launch.parameters.k = kReadRounds;
  launch.threadgroups = {static_cast<uint32_t>(threadgroups), 1, 1};
  launch.threads = kRooflineThreads;
  const int64_t sum_bytes = threadgroups * kRooflineThreads * int64_t{sizeof(uint32_t)};
  launch.buffers = {{MARLIN_BUFFER_INPUT, data_.get(), threadgroups * kGroupBytes},
                    {MARLIN_BUFFER_OUTPUT, sums_.get(), sum_bytes, true, false}};
  return launch;
}

KernelLaunch GpuRoofline::MatrixLaunch() const {
  KernelLaunch launch;
  launch.source = "roofline.metal";
  launch.function = "marlin_roofline_multiply";
  launch.parameters.k = matrix_steps_;
  launch.threadgroups = {static_cast<uint32_t>(matrix_threads() / kRooflineThreads), 1, 1};
  launch.threads = kRooflineThreads;
  constexpr int64_t kInputBytes = (2 + kRooflineSums) * int64_t{sizeof(float)};
  const int64_t sum_bytes = matrix_threads() * int64_t{sizeof(float)};
  launch.buffers = {{MARLIN_BUFFER_INPUT, matrix_inputs_.get(), kInputBytes},
                    {MARLIN_BUFFER_OUTPUT, matrix_sums_.get(), sum_bytes, true, false}};
  return launch;
}

Result<double> GpuRoofline::Seconds(const KernelLaunch& launch, int calls) const {
  MARLIN_RETURN_IF_ERROR(driver_->Synchronize(nullptr));
  const auto start = std::chrono::steady_clock::now();
  for (int call = 0; call < calls; ++call) {
    MARLIN_RETURN_IF_ERROR(driver_->Run({&launch, 1}, nullptr));
  }
  MARLIN_RETURN_IF_ERROR(driver_->Synchronize(nullptr));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / calls;
}

Result<double> GpuRoofline::ReadSeconds() {
  return Seconds(ReadLaunch(read_bytes_ / kGroupBytes), kReadPasses);
}

Result<double> GpuRoofline::MatrixFlops() {
  MARLIN_ASSIGN_OR_RETURN(const double seconds, Seconds(MatrixLaunch(), kMatrixCalls));
  const int64_t simdgroups = matrix_threads() / kLanes;
  const int64_t products = simdgroups * kRooflineSums * matrix_steps_;
  return static_cast<double>(products) * kMatrixOperations / seconds;
}

Result<double> GpuRoofline::CallSeconds() {
  KernelLaunch launch = ReadLaunch(1);
  launch.parameters.k = 0;
  return Seconds(launch, kEmptyCalls);
}

}  // namespace marlin::metal
