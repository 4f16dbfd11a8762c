// The devices and kernel rows of this machine.
#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "backends/cpu/kernel_table.h"
#include "base/macros.h"
#include "runner.h"

namespace marlin::conformance {
namespace {

constexpr Isa kLevels[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx, Isa::kNeon};

// Opens the CPU at one level; the variable is put back as it was.
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

// MARLIN_CPU limits the levels that are judged.
bool IsAllowed(Isa level) {
  const char* limit = std::getenv("MARLIN_CPU");
  if (limit == nullptr || *limit == '\0') return true;
  for (Isa allowed : kLevels) {
    if (std::string_view(limit) == IsaName(allowed)) return level <= allowed;
  }
  return true;
}

}  // namespace

Result<Machine> Machine::Open() {
  Machine machine;
  std::map<Isa, std::string> missing;
  for (Isa level : kLevels) {
    if (!IsAllowed(level)) {
      missing[level] = fmt::format("MARLIN_CPU leaves out {}", IsaName(level));
      continue;
    }
    Result<Device> device = OpenLevel(level, 2);
    if (device.ok()) {
      machine.devices_.emplace(level, *device);
      machine.best_ = level;
    } else {
      missing[level] = fmt::format("no {}", IsaName(level));
    }
  }
  if (machine.devices_.empty()) return Status(Code::kUnsupported, "no CPU level opens");

  for (const KernelDesc& desc : cpu::CpuKernels()) {
    Row row{desc.name, desc.op, desc.level, &desc, missing[desc.level]};
    if (row.unavailable.empty()) {
      for (const KernelInfo& info : machine.devices_.at(desc.level).info().kernels) {
        if (info.name == desc.name && !info.available) row.unavailable = info.reason;
      }
    }
    machine.rows_.push_back(std::move(row));
  }
  machine.rows_.push_back({std::string(kPlanned), "gemm", machine.best_, nullptr, ""});
  // Dequantize is not in the table: the level of a device decides how it decodes.
  for (Isa level : kLevels) {
    machine.rows_.push_back({fmt::format("marlin_dequantize_{}", IsaName(level)), "dequantize",
                             level, nullptr, missing[level]});
  }
  return machine;
}

std::span<const KernelDesc> Machine::Kernels() const { return cpu::CpuKernels(); }

const Row* Machine::Find(std::string_view name) const {
  for (const Row& row : rows_) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

const Device& Machine::DeviceFor(const Row& row) const { return devices_.at(row.level); }

Result<Device> Machine::DeviceWithThreads(const Row& row, int threads) const {
  static std::map<std::pair<Isa, int>, Device> cache;
  const std::pair key(row.level, threads);
  if (const auto found = cache.find(key); found != cache.end()) return found->second;
  MARLIN_ASSIGN_OR_RETURN(Device device, OpenLevel(key.first, threads));
  cache.emplace(key, device);
  return device;
}

const KernelDesc* Machine::Kernel(std::string_view name) const {
  const Row* row = Find(name);
  return row == nullptr ? nullptr : row->desc;
}

}  // namespace marlin::conformance
