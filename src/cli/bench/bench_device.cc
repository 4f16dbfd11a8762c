#include "cli/bench/bench_device.h"

#include "base/macros.h"
#include "bench/gpu.h"
#include "bench/timed_device.h"

namespace marlin::cli {

BenchDevice::BenchDevice(const BenchArguments& arguments)
    : argument_(arguments.device), pool_(static_cast<int>(arguments.threads.value_or(0))) {
  options_.threads = pool_.worker_count();
  options_.parallel_for = [this](int64_t count, const std::function<void(int64_t)>& body) {
    pool_.Run(count, [&body](int64_t i, int) { body(i); });
  };
}

Result<std::unique_ptr<BenchDevice>> BenchDevice::Find(const BenchArguments& arguments) {
  MARLIN_ASSIGN_OR_RETURN(const std::string name, arguments.device.Name());
  MARLIN_RETURN_IF_ERROR(bench::CheckTimed(name));
  std::unique_ptr<BenchDevice> found(new BenchDevice(arguments));
  found->name_ = name;
  if (name == "auto") {
    MARLIN_RETURN_IF_ERROR(found->Open());
    found->name_ = found->device().info().name;
  }
  return found;
}

Status BenchDevice::Open() {
  if (device_) return {};
  MARLIN_ASSIGN_OR_RETURN(device_, argument_.Open(options_));
  return {};
}

int64_t BenchDevice::beyond_cache_bytes() const {
  return is_cuda() ? bench::kBeyondL2Bytes : bench::kBeyondCacheBytes;
}

}  // namespace marlin::cli
