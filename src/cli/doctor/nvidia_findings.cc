#include "cli/doctor/nvidia_findings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "backends/cuda/plan/device_refusal.h"
#include "base/text_table.h"
#include "ops/device/device.h"

namespace marlin::cli {
namespace {

using State = Finding::State;

/// Toolkits from this one on pack kernels (cmake/MarlinCuda.cmake) as drivers for earlier versions
/// than the other cannot unpack them.
constexpr int kPackingToolkit = 12080;
constexpr int kUnpackingDriver = 12040;

std::string FirstLine(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// Display and 3D controllers of NVIDIA.
int64_t CountOnBus(const std::string& root) {
  std::error_code error;
  int64_t count = 0;
  for (std::filesystem::directory_iterator it(root + "/sys/bus/pci/devices", error), end;
       !error && it != end; it.increment(error)) {
    const bool is_gpu = FirstLine(it->path() / "vendor") == "0x10de" &&
                        FirstLine(it->path() / "class").starts_with("0x03");
    count += is_gpu ? 1 : 0;
  }
  return count;
}

/// "580.95.05" of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 ...".
std::string DriverVersion(const std::string& root) {
  std::istringstream words(FirstLine(root + "/proc/driver/nvidia/version"));
  for (std::string word; words >> word;) {
    if (word.find_first_not_of("0123456789.") == std::string::npos &&
        word.find('.') != std::string::npos) {
      return word;
    }
  }
  return {};
}

/// "; driver 580.95.05, for CUDA up to 13.0; this build: CUDA 12.9".
std::string Versions(const NvidiaFacts& facts) {
  std::string text;
  if (!facts.driver.empty()) text += "; driver " + facts.driver;
  if (facts.build.driver != 0) {
    text += fmt::format("{} for CUDA up to {}", facts.driver.empty() ? "; driver" : ",",
                        cuda::VersionName(facts.build.driver));
  }
  if (facts.build.runtime != 0) {
    text += fmt::format("; this build: CUDA {}, code for {}",
                        cuda::VersionName(facts.build.runtime), facts.build.codes);
  }
  if (!facts.build.lacking.empty()) {
    text += fmt::format(", no kernels for {}", fmt::join(facts.build.lacking, ", "));
  }
  return text;
}

Finding OpenedFinding(const OpenedGpu& gpu, const NvidiaFacts& facts) {
  Finding finding = {
      kGpuGroup, gpu.info.name, State::kOk,
      fmt::format("{}: {}, {} free{}", gpu.info.model, fmt::join(gpu.info.features, ", "),
                  FormatBytes(gpu.free_memory), Versions(facts))};
  if (gpu.free_memory < kLittleMemory) {
    finding.state = State::kWarning;
    finding.advice = "end the programs that use it, which nvidia-smi lists, or name another device";
  } else if (!facts.build.lacking.empty()) {
    finding.state = State::kWarning;
    finding.advice = "for models of these formats, build again without MARLIN_CUDA_KINDS";
  }
  return finding;
}

std::string UpdateAdvice(int version) {
  return fmt::format("update NVIDIA's driver to one for CUDA {} or later",
                     cuda::VersionName(version));
}

std::string AdviceFor(const Status& status, const cuda::CudaBuild& build) {
  const auto says = [&status](std::string_view words) {
    return status.message().find(words) != std::string::npos;
  };
  switch (status.code()) {
    case Code::kOutOfMemory:
      return "end the programs that use it, which nvidia-smi lists";
    case Code::kDeviceLost:
      return "reset it (nvidia-smi --gpu-reset) or restart the machine, then look at dmesg";
    default:
      break;
  }
  if (says(cuda::kTooOldWords)) return "no build runs it: take another device, or the CPU";
  if (says(cuda::kNewerDriverWords)) return UpdateAdvice(build.runtime);
  if (build.driver != 0 && build.driver < kUnpackingDriver && build.runtime >= kPackingToolkit) {
    return UpdateAdvice(kUnpackingDriver) + ": earlier ones cannot unpack this build's kernels";
  }
  return "do what the reason says; until then models run on another device or the CPU";
}

/// The error begins with the device's name.
Finding RefusedFinding(const Status& status, const cuda::CudaBuild& build) {
  const std::string& message = status.message();
  const size_t colon = message.find(": ");
  const bool named = message.starts_with("cuda") && colon != std::string::npos;
  return {kGpuGroup, named ? message.substr(0, colon) : "cuda", State::kWarning,
          named ? message.substr(colon + 2) : message, AdviceFor(status, build)};
}

Finding WithoutCuda(const NvidiaFacts& facts) {
  if (facts.on_bus == 0 && facts.driver.empty()) {
    return {kGpuGroup, "cuda", State::kMissing,
            "no NVIDIA GPU here; this build has no code for one"};
  }
  return {
      kGpuGroup, "cuda", State::kWarning,
      fmt::format("this machine has {}{}, and this build has no code for them",
                  facts.on_bus == 0 ? "NVIDIA's driver" : FormatCounted(facts.on_bus, "NVIDIA GPU"),
                  facts.on_bus == 0 || facts.driver.empty() ? "" : ", driver " + facts.driver),
      "install a wheel with CUDA, or CUDA's toolkit (12.5 or later), and build again: ./dev "
      "build"};
}

Finding WithoutDevice(const NvidiaFacts& facts) {
  Finding finding = {kGpuGroup, "cuda", State::kWarning, facts.none + Versions(facts)};
  const bool has_library = facts.build.driver != 0;
  if (!has_library && facts.on_bus == 0 && facts.driver.empty()) {
    finding.state = State::kMissing;
    finding.found = "no NVIDIA GPU and no driver here" + Versions(facts);
  } else if (!has_library && facts.driver.empty()) {
    finding.advice = "install NVIDIA's driver, until nvidia-smi lists the GPU";
  } else if (!has_library) {
    finding.advice =
        "a container needs its GPUs handed over, such as by docker run --gpus all; elsewhere "
        "install the driver's libraries";
  } else if (facts.build.driver / 1000 < facts.build.runtime / 1000) {
    finding.advice = UpdateAdvice(facts.build.runtime / 1000 * 1000);
  } else if (facts.visible) {
    finding.advice = fmt::format("CUDA_VISIBLE_DEVICES='{}' may hide GPUs: unset it or name one",
                                 *facts.visible);
  } else {
    finding.advice =
        "look at what nvidia-smi says; a container needs its GPUs handed over, such as "
        "by docker run --gpus all";
  }
  return finding;
}

}  // namespace

NvidiaFacts FindNvidia(const std::string& root) {
  NvidiaFacts facts;
  facts.build = cuda::GetCudaBuild();
  for (const DeviceInfo& info : ListDevices(&facts.refused)) {
    if (info.backend != "cuda") continue;
    const Result<Device> device = Device::Open(info.name);
    facts.devices.push_back(
        {info, device.ok() ? Internals::Impl(*device).backend().free_memory() : 0});
  }
  if (const Result<Device> device = Device::Open("cuda"); !device.ok()) {
    facts.none = ReasonOf(device.status(), "cuda");
  }
  facts.on_bus = CountOnBus(root);
  facts.driver = DriverVersion(root);
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    facts.visible = visible;
  }
  return facts;
}

std::vector<Finding> NvidiaFindings(const NvidiaFacts& facts) {
  std::vector<Finding> findings;
  for (const OpenedGpu& gpu : facts.devices) findings.push_back(OpenedFinding(gpu, facts));
  for (const Status& status : facts.refused)
    findings.push_back(RefusedFinding(status, facts.build));
  if (!findings.empty()) return findings;
  return {facts.build.runtime == 0 ? WithoutCuda(facts) : WithoutDevice(facts)};
}

}  // namespace marlin::cli
