// Times sequences of launches as CUDA graphs, and launches the probes that products are compared
// with.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "marlin/status.h"

namespace marlin::cuda {

/// Puts launch `i` of a sequence on a stream (a cudaStream_t).
using Launch = std::function<Status(int i, void* stream)>;

/// A sequence of launches, ready to be run again and again.
class CapturedLaunches {
 public:
  virtual ~CapturedLaunches() = default;
  /// Runs the sequence once, waits, and returns its seconds divided by the number of launches.
  /// Errors: kDeviceLost.
  virtual Result<double> Replay() = 0;
};

/// What the device does at best.
enum class Probe : uint8_t {
  kEmpty,      ///< A kernel that does nothing.
  kReadBulk,   ///< Reads memory by bulk copies into shared memory, one thread block per SM.
  kReadLoads,  ///< Reads memory by ordinary loads of 16 bytes.
};

/// One stream of one device. Not thread-safe.
class GraphTimer {
 public:
  virtual ~GraphTimer() = default;

  /// Calls launch(0) once by itself, so that what is loaded on first use is there, then captures
  /// launch(0) .. launch(count - 1) as one graph, with the events that time it inside: what the
  /// host needs to submit a graph is not counted. Launches depend on each other as on the stream:
  /// on the whole launch before, or on what programmatic dependent launch asks for. Launches may
  /// neither allocate nor wait. Errors: those of `launch`; kInternal and kDeviceLost, naming the
  /// CUDA call.
  virtual Result<std::unique_ptr<CapturedLaunches>> Capture(int count, const Launch& launch) = 0;

  /// Launches a probe; `data` holds `bytes` readable bytes, a multiple of 64 KiB, in the device's
  /// memory (kEmpty: null). Errors: kInternal.
  virtual Status LaunchProbe(Probe probe, const void* data, int64_t bytes, void* stream) = 0;
};

/// Opens a timer on "cuda" or "cuda:N", which becomes the calling thread's current device. Errors:
/// kUnsupported in builds without CUDA, kDeviceLost.
Result<std::unique_ptr<GraphTimer>> OpenGraphTimer(std::string_view device);

}  // namespace marlin::cuda
