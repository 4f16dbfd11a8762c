// Times sequences of launches as CUDA graphs, and launches the roofline probes that GEMMs are
// compared with.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "marlin/status.h"

namespace marlin::cuda {

/// Puts launch `i` of a sequence on a stream (a cudaStream_t).
using TimedLaunch = std::function<Status(int i, void* stream)>;

/// A captured sequence of launches, which can be replayed any number of times.
class CapturedLaunches {
 public:
  virtual ~CapturedLaunches() = default;
  /// Runs the sequence once, waits, and returns its seconds divided by the number of launches.
  /// Errors: kDeviceLost.
  virtual Result<double> Replay() = 0;
};

/// Kernels that measure the limits of the device.
enum class Probe : uint8_t {
  kEmpty,      ///< A kernel that does nothing.
  kReadBulk,   ///< Reads memory by bulk copies into shared memory, one CTA per SM.
  kReadLoads,  ///< Reads memory by ordinary loads of 16 bytes.
};

/// One stream of one device. Not thread-safe.
class GraphTimer {
 public:
  virtual ~GraphTimer() = default;

  /// Calls launch(0) once eagerly to load lazily loaded modules, then captures launch(0) to
  /// launch(count - 1) as one graph with the timing events inside, so that submitting the graph is
  /// not timed. Launches keep their stream dependencies: each waits for the whole launch before
  /// it, or overlaps it by programmatic dependent launch. Launches may neither allocate nor
  /// synchronize. Errors: as `launch`; kInternal and kDeviceLost, naming the CUDA call.
  virtual Result<std::unique_ptr<CapturedLaunches>> Capture(int count,
                                                            const TimedLaunch& launch) = 0;

  /// Launches a probe; `data` holds `bytes` readable bytes, a multiple of 64 KiB, in the device's
  /// memory (kEmpty: null). Errors: kInternal.
  virtual Status LaunchProbe(Probe probe, const void* data, int64_t bytes, void* stream) = 0;
};

/// Opens a timer on "cuda" or "cuda:N", which becomes the calling thread's current device. Errors:
/// kUnsupported in builds without CUDA, kDeviceLost.
Result<std::unique_ptr<GraphTimer>> OpenGraphTimer(std::string_view device);

}  // namespace marlin::cuda
