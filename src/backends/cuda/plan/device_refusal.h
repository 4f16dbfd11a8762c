// Why a CUDA device cannot be opened, in words that say what to do about it.
#pragma once

#include <string>
#include <string_view>

namespace marlin::cuda {

/// Why a device runs no code of the build: there is none for it, or PTX that its driver is too old
/// for; or the device has no memory for it, or does not work.
enum class LacksCode { kIsNotBuilt, kNeedsDriver, kNeedsMemory, kFails };

/// A device and the build, as far as they decide whether the one runs the other.
struct DeviceSupport {
  std::string_view name;        ///< "cuda:0".
  std::string_view model;       ///< "NVIDIA A100-SXM4-80GB".
  int capability = 0;           ///< Compute capability times ten.
  int code = 0;                 ///< As DeviceCode().
  std::string_view built = {};  ///< As BuiltCodes().
  /// CUDA's error where `code` is 0, and what it means.
  std::string_view error = {};
  LacksCode lacks = LacksCode::kIsNotBuilt;
};

/// Words of RefusalOf about a device that no build runs, and one that needs a newer driver.
inline constexpr std::string_view kTooOldWords = "the kernels need 8.0 (Ampere) or later";
inline constexpr std::string_view kNewerDriverWords = "whose PTX needs a newer driver";

/// Empty if the device can be opened.
std::string RefusalOf(const DeviceSupport& device);

/// "cuda:1: no CUDA device (why)"; with the versions, as cudaDriverGetVersion and
/// cudaRuntimeGetVersion give them, where the driver is older than the build. Driver 0: none.
std::string NoDevice(std::string_view name, std::string_view why, int driver, int runtime);

/// "12.4" for 12040, a version as cudaDriverGetVersion gives it.
std::string VersionName(int version);

/// "8.0" for 80.
std::string CapabilityName(int capability);

}  // namespace marlin::cuda
