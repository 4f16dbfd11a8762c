// The devices and kernel rows of this machine.
#include <fmt/format.h>

#include <cstdlib>
#include <mutex>
#include <utility>

#include "backends/cpu/gemm/kernel_table.h"
#include "backends/cuda/plan/kernel_table.h"
#include "backends/metal/plan/kernel_table.h"
#include "base/internals.h"
#include "base/macros.h"
#include "block_cases.h"
#include "ops/device/device.h"
#include "runner.h"

namespace marlin::conformance {
namespace {

constexpr Isa kLevels[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx, Isa::kNeon};

// Opens the CPU at one level and restores the environment variable.
Result<Device> OpenLevel(Isa level, int threads) {
  const char* before = std::getenv("MARLIN_CPU");
  const std::string saved = before == nullptr ? "" : before;
  setenv("MARLIN_CPU", IsaName(level), 1);
  DeviceOptions options;
  options.threads = threads;
  Result<Device> device = Device::Open("cpu", options);
  if (saved.empty()) {
    unsetenv("MARLIN_CPU");
  } else {
    setenv("MARLIN_CPU", saved.c_str(), 1);
  }
  return device;
}

// MARLIN_CPU limits the levels under test.
bool IsAllowed(Isa level) {
  const char* limit = std::getenv("MARLIN_CPU");
  if (limit == nullptr || *limit == '\0') return true;
  for (Isa allowed : kLevels) {
    if (std::string_view(limit) == IsaName(allowed)) return level <= allowed;
  }
  return true;
}

// Opens a Mac's GPU, or on other machines the simulator.
Result<Device> OpenMetal() {
  Result<Device> simulator = Device::Open("metal-sim");
  return simulator.ok() ? simulator : Device::Open("metal");
}

// Opens a GPU that keeps 2:4 weights sparse.
Result<Device> OpenCuda() {
  setenv("MARLIN_CUDA_SPARSE", "1", 0);
  return Device::Open("cuda");
}

// Returns why the device does not run the kernel; empty if it does.
std::string WhyNot(const Device& device, std::string_view kernel) {
  for (const KernelInfo& info : device.info().kernels) {
    if (info.name == kernel && !info.available) return info.reason;
  }
  return {};
}

}  // namespace

Result<Machine> Machine::Open(std::string_view backend, std::optional<Isa> only) {
  Machine machine;
  const auto judged = [&](std::string_view name) { return backend == "all" || backend == name; };
  if (judged("cpu")) MARLIN_RETURN_IF_ERROR(machine.AddCpu(only));
  if (judged("cuda")) {
    machine.AddDevice("cuda", Isa::kCuda, OpenCuda(), cuda::CudaKernels());
  }
  if (judged("metal")) {
    machine.AddDevice("metal", Isa::kMetal, OpenMetal(), metal::MetalKernels());
  }
  return machine;
}

Machine Machine::Of(std::string_view backend, Isa level, const Device& device,
                    std::span<const KernelDesc> kernels) {
  Machine machine;
  machine.AddDevice(backend, level, device, kernels);
  return machine;
}

Status Machine::AddCpu(std::optional<Isa> only) {
  std::map<Isa, std::string> missing;
  Isa best = Isa::kScalar;
  const auto judged = [&](Isa level) { return !only || *only == level; };
  for (Isa level : kLevels) {
    if (!judged(level)) continue;
    if (!IsAllowed(level)) {
      missing[level] = fmt::format("MARLIN_CPU leaves out {}", IsaName(level));
      continue;
    }
    Result<Device> device = OpenLevel(level, kCpuThreads);
    if (device.ok()) {
      devices_.emplace(level, *device);
      best = level;
    } else {
      missing[level] = fmt::format("no {}", IsaName(level));
    }
  }
  if (devices_.empty()) {
    return Status(Code::kUnsupported,
                  only ? "skipped: " + missing[*only] : std::string("no CPU level opens"));
  }

  backends_.push_back("cpu");
  for (const KernelDesc& desc : cpu::CpuKernels()) {
    if (!judged(desc.level)) continue;
    Row row{desc.name, "cpu", desc.op, desc.level, &desc, missing[desc.level]};
    if (row.unavailable.empty()) row.unavailable = WhyNot(devices_.at(desc.level), desc.name);
    rows_.push_back(std::move(row));
  }
  rows_.push_back({std::string(kPlanned), "cpu", "gemm", best, nullptr, ""});
  // The other operations are not in the kernel table: the device's level selects their code.
  for (Isa level : kLevels) {
    if (judged(level)) AddOperations(IsaName(level), "cpu", level, missing[level]);
  }
  return Status();
}

void Machine::AddDevice(std::string_view backend, Isa level, const Result<Device>& device,
                        std::span<const KernelDesc> kernels) {
  const std::string name(backend);
  std::string missing;
  if (device.ok()) {
    devices_.emplace(level, *device);
  } else {
    missing =
        fmt::format("no {} device ({})", name == "cuda" ? "CUDA" : name, device.status().message());
  }
  backends_.push_back(name);
  for (const KernelDesc& desc : kernels) {
    Row row{desc.name, name, desc.op, level, &desc, missing};
    if (device.ok()) row.unavailable = WhyNot(*device, desc.name);
    rows_.push_back(std::move(row));
  }
  rows_.push_back({std::string(kPlanned), name, "gemm", level, nullptr, missing});
  AddOperations(name, name, level, missing);
}

void Machine::AddOperations(const std::string& suffix, const std::string& backend, Isa level,
                            const std::string& missing) {
  for (const char* op : {"dequantize", "router", "experts"}) {
    rows_.push_back(
        {fmt::format("marlin_{}_{}", op, suffix), backend, op, level, nullptr, missing});
  }
}

const Row* Machine::Find(std::string_view backend, std::string_view name) const {
  for (const Row& row : rows_) {
    if (row.backend == backend && row.name == name) return &row;
  }
  return nullptr;
}

const KernelDesc* Machine::FindKernel(std::string_view backend, std::string_view name) const {
  if (const Row* row = Find(backend, name)) return row->desc;
  for (const KernelDesc& kernel : KernelTable(backend)) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

std::optional<DeviceProperties> Machine::CudaProperties() const {
  const auto found = devices_.find(Isa::kCuda);
  if (found == devices_.end()) return {};
  return Internals::Impl(found->second).backend().Properties();
}

const Device& Machine::DeviceFor(const Row& row) const { return devices_.at(row.level); }

Result<Device> Machine::DeviceWithThreads(const Row& row, int threads) const {
  static std::mutex mutex;
  static std::map<std::pair<Isa, int>, Device> cache;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair key(row.level, threads);
  if (const auto found = cache.find(key); found != cache.end()) return found->second;
  MARLIN_ASSIGN_OR_RETURN(Device device, OpenLevel(key.first, threads));
  cache.emplace(key, device);
  return device;
}

std::span<const KernelDesc> KernelTable(std::string_view backend) {
  if (backend == "cpu") return cpu::CpuKernels();
  return backend == "cuda" ? cuda::CudaKernels() : metal::MetalKernels();
}

}  // namespace marlin::conformance
