// The ceilings that results are compared with.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "backends/cpu/runtime/roofline.h"
#include "backends/metal/runtime/gpu_roofline.h"
#include "bench/baselines/baseline_cublas.h"
#include "bench/gemm.h"
#include "bench/gpu.h"
#include "cli/bench/bench_device.h"

namespace marlin::cli {

/// A device whose ceilings have been measured, with what times it.
class Machine {
 public:
  /// Measures the ceilings, which takes seconds. `opened` must outlive the machine; `measured` is
  /// its device, or the one that a model took instead. Errors: of the device.
  static Result<std::unique_ptr<Machine>> Measure(BenchDevice& opened, const Device& measured);

  const Device& device() const { return device_; }
  const DeviceInfo& info() const { return info_; }
  const bench::MachineCeilings& ceilings() const { return ceilings_; }
  /// The probe of a CPU, or of a GPU that shares the host's memory.
  const bench::ReadProbe& probe() const { return probe_; }
  /// Null unless the device is a CUDA one; cuBLAS is the baseline where it is installed.
  bench::GpuBench* gpu() const { return gpu_.get(); }
  cuda::GraphTimer& timer() const { return *timer_; }
  const bench::GpuCeilings& gpu_ceilings() const { return gpu_ceilings_; }
  const Status& cublas_status() const { return cublas_status_; }
  std::string cublas_version() const { return cublas_ ? cublas_->version : ""; }

  /// {"device", "date", "commit", "roofline", "results": []}.
  nlohmann::ordered_json Document(const std::string& commit) const;
  /// Lines of text: the device and its ceilings.
  std::string Heading() const;

 private:
  explicit Machine(const Device& device) : device_(device), info_(device.info()) {}
  Status MeasureCuda(const std::string& name);

  Device device_;
  DeviceInfo info_;
  bench::MachineCeilings ceilings_;
  bench::ReadProbe probe_;
  std::optional<cpu::Roofline> cpu_roofline_;
  std::optional<metal::GpuRoofline> metal_roofline_;
  std::unique_ptr<cuda::GraphTimer> timer_;
  std::optional<bench::CublasBaseline> cublas_;
  Status cublas_status_;
  std::unique_ptr<bench::GpuBench> gpu_;
  bench::GpuCeilings gpu_ceilings_;
};

}  // namespace marlin::cli
