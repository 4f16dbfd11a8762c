#include "cli/doctor/machine_findings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "base/host/control_groups.h"
#include "base/memory_size.h"
#include "base/text_table.h"
#include "base/thread_pool.h"
#include "marlin/device.h"

namespace marlin::cli {
namespace {

using State = Finding::State;

Finding ProcessorFinding(const MachineFacts& facts) {
  const Isa best = cpu::BestLevel(facts.features);
  Finding finding = {kMachineGroup, "processor", State::kOk, ""};
  const std::vector<std::string> names = facts.features.Names();
  const std::string model = fmt::format("{} ({})", facts.features.model,
                                        names.empty() ? "no vector instructions that kernels use"
                                                      : fmt::format("{}", fmt::join(names, ", ")));
  if (facts.forced && !facts.forced->value.empty()) {
    Result<Isa> level = cpu::ParseIsa(facts.forced->name, facts.forced->value);
    Status refused = level.status();
    if (level.ok()) {
      refused = cpu::CheckLevel(*level, facts.features).WithContext(facts.forced->name);
    }
    finding.advice = fmt::format("unset {} for {}", facts.forced->name, IsaName(best));
    if (!refused.ok()) {
      finding.state = State::kBroken;
      finding.found = refused.message();
      return finding;
    }
    finding.found = fmt::format("{}; {} forces {}", model, facts.forced->name, IsaName(*level));
    finding.state = *level == best ? State::kOk : State::kWarning;
    if (*level == best) finding.advice.clear();
    return finding;
  }
  finding.found = fmt::format("{}; kernels for {}", model, IsaName(best));
  if (best == Isa::kScalar) {
    finding.state = State::kWarning;
    finding.advice = "expect little speed: fast kernels need AVX2, FMA and F16C, or NEON";
  }
  return finding;
}

Finding ThreadsFinding(const MachineFacts& facts) {
  Finding finding = {
      kMachineGroup, "threads", State::kOk,
      fmt::format("{} of {}", facts.threads, FormatCounted(facts.processors, "processor"))};
  if (facts.quota && *facts.quota < facts.threads) {
    finding.state = State::kWarning;
    finding.found += fmt::format(
        ", with the time of {:.2g} (a limit of the container or batch "
        "system)",
        *facts.quota);
    finding.advice = fmt::format("give commands --threads {}",
                                 std::max(1, static_cast<int>(std::floor(*facts.quota))));
  }
  return finding;
}

Finding MemoryFinding(const MachineFacts& facts) {
  Finding finding = {
      kMachineGroup, "memory", State::kOk,
      facts.free ? fmt::format("{} free of {}", FormatBytes(*facts.free), FormatBytes(facts.memory))
                 : FormatBytes(facts.memory)};
  if (facts.address_space && *facts.address_space < facts.memory) {
    finding.state = State::kWarning;
    finding.found += fmt::format("; ulimit -v allows {}", FormatBytes(*facts.address_space));
    finding.advice = "raise the limit (ulimit -v unlimited): models are mapped, which counts";
  } else if (facts.free && *facts.free < kLittleMemory) {
    finding.state = State::kWarning;
    finding.advice = "end other programs, or run small models only";
  }
  return finding;
}

}  // namespace

MachineFacts FindMachine() {
  MachineFacts facts;
  facts.features = cpu::GetCpuFeatures();
  facts.forced = ReadEnvironment("METAL_MARLIN_CPU");
  facts.threads = ThreadPool::AvailableProcessors();
  facts.processors = std::max(facts.threads, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  facts.quota = ReadGroupLimits().processors;
  facts.memory = MemoryBytes();
  facts.free = FreeMemoryBytes();
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    facts.address_space = static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX));
  }
  return facts;
}

std::vector<Finding> MachineFindings(const MachineFacts& facts) {
  return {ProcessorFinding(facts), ThreadsFinding(facts), MemoryFinding(facts)};
}

std::vector<Finding> MetalFindings() {
  Finding metal = {kGpuGroup, "metal", State::kMissing, ""};
  for (const DeviceInfo& info : ListDevices()) {
    if (info.backend != "metal") continue;
    metal.state = State::kOk;
    metal.found = fmt::format("{}: {}", info.model, fmt::join(info.features, ", "));
    metal.advice = "metal-marlin doctor --device metal tests its kernels";
  }
  if (metal.state != State::kOk) {
#ifdef __APPLE__
    metal.state = State::kWarning;
    metal.found = ReasonOf(Device::Open("metal").status(), "metal");
    metal.advice = "see docs/howto/apple-gpus.md; until then models run on the CPU";
#else
    metal.found = "no Apple GPU here";
#endif
  }
  Finding simulator = {kGpuGroup, "metal-sim", State::kOk,
                       "the simulator of an Apple GPU is ready"};
  if (const Result<Device> device = Device::Open("metal-sim"); !device.ok()) {
    simulator.state = State::kMissing;
    simulator.found = ReasonOf(device.status(), "metal-sim");
    simulator.advice = "only for work on Metal kernels: docs/howto/metal-sim.md";
  }
  return {metal, simulator};
}

}  // namespace marlin::cli
