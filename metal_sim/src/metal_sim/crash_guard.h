// Signals of the operating system that a kernel causes, such as by an access beyond its own stack,
// which instrumentation does not see: they end the launch with a finding and not the process.
#pragma once

#include <cstdint>

namespace metal_sim {

struct CrashSite {
  enum class Cause : uint8_t { kMemory, kBounds };
  Cause cause = Cause::kMemory;
  const void* site = nullptr;
};

/// While one exists, signals that come on a fiber of the simulation of their thread go to
/// Simulation::Crash, others where they went before. Any thread may have one.
class CrashGuard {
 public:
  CrashGuard();
  ~CrashGuard();
  CrashGuard(const CrashGuard&) = delete;
  CrashGuard& operator=(const CrashGuard&) = delete;
};

}  // namespace metal_sim
