// Kernels for the simulator's runtime as plain functions: each load and store first notifies the
// runtime, as instrumented code does.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "metal_sim/launch.h"

namespace metal_sim {

inline const Runtime& Sim() { return *SimulatorRuntime(); }

/// A fake address in a kernel's code.
inline const void* Site(uintptr_t number) { return reinterpret_cast<const void*>(0x1000 + number); }

template <typename T>
T Load(const T* address, uintptr_t site) {
  Sim().access(address, sizeof(T), false, Site(site));
  T value;
  std::memcpy(&value, address, sizeof(T));  // Some tests use misaligned addresses.
  return value;
}

template <typename T>
void Store(T* address, T value, uintptr_t site) {
  Sim().access(address, sizeof(T), true, Site(site));
  std::memcpy(address, &value, sizeof(T));
}

template <typename T>
T AtomicAdd(T* address, T value, uintptr_t site, int order = kRelaxed) {
  Sim().atomic(address, sizeof(T), true, true, order, Site(site));
  return std::exchange(*address, *address + value);
}

template <typename T>
T AtomicLoad(T* address, uintptr_t site, int order = kRelaxed) {
  Sim().atomic(address, sizeof(T), true, false, order, Site(site));
  return *address;
}

template <typename T>
void AtomicStore(T* address, T value, uintptr_t site, int order = kRelaxed) {
  Sim().atomic(address, sizeof(T), false, true, order, Site(site));
  *address = value;
}

inline uint32_t ThreadIndex() { return Sim().position(Source::kThreadIndexInThreadgroup).x; }

inline uint32_t GroupIndex() { return Sim().position(Source::kThreadgroupPositionInGrid).x; }

template <typename T>
T* Buffer(int index) {
  return static_cast<T*>(Sim().buffer(index));
}

/// A threadgroup variable `T name[count]`.
template <typename T>
T* Tile(size_t count, int id = 0, const char* name = "tile") {
  return static_cast<T*>(Sim().threadgroup_variable(id, count * sizeof(T), alignof(T), name));
}

/// The sum over the participating lanes, as simd_sum.
inline uint32_t SimdSum(uint32_t value, uintptr_t site, bool whole = false) {
  const Collective sum = [](void* const* data, uint32_t lanes, void*) {
    uint32_t total = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if ((lanes >> lane & 1) != 0) total += *static_cast<uint32_t*>(data[lane]);
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (data[lane] != nullptr) *static_cast<uint32_t*>(data[lane]) = total;
    }
  };
  Sim().collective(&value, sum, nullptr, "simd_sum", whole, Site(site));
  return value;
}

/// Runs a function as a kernel, with one buffer of words at index 0.
class SimulatorTest : public ::testing::Test {
 protected:
  SimulatorTest() {
    launch_.threads_per_threadgroup = {64, 1, 1};
    arguments_ = {{metal_sim::Source::kBuffer, 0, "out"}};
  }

  Result<Report> TryRun(std::function<void()> body) {
    body_ = std::move(body);
    launch_.buffers[0].data = words_.data();
    launch_.buffers[0].bytes = static_cast<int64_t>(words_.size() * sizeof(uint32_t));
    const metal_sim::Kernel kernel = {"kernel", arguments_.data(),
                                      static_cast<int>(arguments_.size()), [] { body_(); }};
    return Simulate(kernel, launch_, options_);
  }

  Report Run(std::function<void()> body) {
    Result<Report> report = TryRun(std::move(body));
    EXPECT_TRUE(report.ok()) << report.status().message();
    return report.ok() ? *std::move(report) : Report();
  }

  std::vector<uint32_t> words_ = std::vector<uint32_t>(256);
  std::vector<Argument> arguments_;
  Launch launch_;
  SimulationOptions options_;

 private:
  inline static std::function<void()> body_;
};

/// The findings of a kind.
inline std::vector<Finding> Of(const Report& report, FindingKind kind) {
  std::vector<Finding> found;
  for (const Finding& finding : report.findings) {
    if (finding.kind == kind) found.push_back(finding);
  }
  return found;
}

/// All findings as text, for test messages.
inline std::string Text(const Report& report) {
  std::string text;
  for (const Finding& finding : report.findings) {
    text += std::string(FindingKindName(finding.kind)) + ": " + finding.text + "\n";
  }
  return text;
}

/// Whether there is a race between these two sites, in either order.
inline bool HasRace(const Report& report, uintptr_t a, uintptr_t b) {
  for (const Finding& finding : Of(report, FindingKind::kRace)) {
    if (finding.site == Site(a) && finding.other_site == Site(b)) return true;
    if (finding.site == Site(b) && finding.other_site == Site(a)) return true;
  }
  return false;
}

}  // namespace metal_sim
