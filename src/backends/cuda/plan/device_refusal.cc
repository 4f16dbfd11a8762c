#include "backends/cuda/plan/device_refusal.h"

namespace marlin::cuda {
namespace {

constexpr int kLeastCapability = 80;

}  // namespace

std::string VersionName(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string CapabilityName(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string RefusalOf(const DeviceSupport& device) {
  const std::string capability = CapabilityName(device.capability);
  const std::string start = std::string(device.name) + ": " + std::string(device.model) +
                            " has compute capability " + capability + "; ";
  if (device.capability < kLeastCapability) {
    return start + std::string(kTooOldWords);
  }
  if (device.code != 0) return {};
  const std::string built = "this build has code for " + std::string(device.built);
  const std::string error(device.error);
  switch (device.lacks) {
    case LacksCode::kNeedsMemory:
    case LacksCode::kFails:
      return std::string(device.name) + ": " + std::string(device.model) + ": " + error;
    case LacksCode::kNeedsDriver:
      return start + built + ", " + std::string(kNewerDriverWords) + " (" + error + ")";
    case LacksCode::kIsNotBuilt:
      break;
  }
  return start + built + ", none for this device (" + error +
         "); build with -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(device.capability);
}

std::string NoDevice(std::string_view name, std::string_view why, int driver, int runtime) {
  std::string text = std::string(name) + ": no CUDA device (";
  // CUDA's words for this are that the driver is too old.
  if (driver == 0) return text + "no driver: libcuda.so.1 does not load)";
  text += why;
  if (driver < runtime) {
    text += "; the driver is for CUDA " + VersionName(driver) + ", this build for " +
            VersionName(runtime);
  }
  return text + ")";
}

}  // namespace marlin::cuda
