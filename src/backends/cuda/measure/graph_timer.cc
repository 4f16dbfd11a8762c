#include "backends/cuda/measure/graph_timer.h"

#include <cuda_runtime_api.h>

#include <charconv>
#include <string>
#include <utility>

#include "backends/cuda/measure/roofline.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// Ok, or an error that names the call: kInternal for a refused capture or launch, which is a fault
/// of this library, otherwise kDeviceLost.
Status Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return Status();
  (void)cudaGetLastError();  // Clears a non-sticky error, which the next call would report again.
  const bool refused =
      error == cudaErrorInvalidValue || error == cudaErrorInvalidConfiguration ||
      error == cudaErrorNotSupported || error == cudaErrorLaunchOutOfResources ||
      (error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread);
  return Status(
      refused ? Code::kInternal : Code::kDeviceLost,
      std::string(call) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

struct DestroyStream {
  void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { (void)cudaEventDestroy(event); }
};
struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { (void)cudaGraphDestroy(graph); }
};
struct DestroyExecutable {
  void operator()(cudaGraphExec_t graph) const { (void)cudaGraphExecDestroy(graph); }
};
using OwnedStream = std::unique_ptr<CUstream_st, DestroyStream>;
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;
using Graph = std::unique_ptr<CUgraph_st, DestroyGraph>;
using Executable = std::unique_ptr<CUgraphExec_st, DestroyExecutable>;

Result<Event> MakeEvent() {
  cudaEvent_t event = nullptr;
  MARLIN_RETURN_IF_ERROR(Check(cudaEventCreate(&event), "cudaEventCreate"));
  return Event(event);
}

class CapturedGraph final : public CapturedLaunches {
 public:
  CapturedGraph(cudaStream_t stream, int count, Event begin, Event end)
      : stream_(stream), count_(count), begin_(std::move(begin)), end_(std::move(end)) {}

  Status Capture(const TimedLaunch& launch) {
    MARLIN_RETURN_IF_ERROR(Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
                                 "cudaStreamBeginCapture"));
    const Status captured = PutOnStream(launch);
    cudaGraph_t graph = nullptr;
    const Status ended = Check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    const Graph owner(graph);
    // A failed launch also invalidates the capture; its own message says more.
    MARLIN_RETURN_IF_ERROR(captured);
    MARLIN_RETURN_IF_ERROR(ended);
    cudaGraphExec_t executable = nullptr;
    MARLIN_RETURN_IF_ERROR(
        Check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate"));
    executable_.reset(executable);
    return Check(cudaGraphUpload(executable, stream_), "cudaGraphUpload");
  }

  Result<double> Replay() override {
    MARLIN_RETURN_IF_ERROR(Check(cudaGraphLaunch(executable_.get(), stream_), "cudaGraphLaunch"));
    MARLIN_RETURN_IF_ERROR(Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"));
    float milliseconds = 0;
    MARLIN_RETURN_IF_ERROR(Check(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()),
                                 "cudaEventElapsedTime"));
    return 1e-3 * static_cast<double>(milliseconds) / count_;
  }

 private:
  /// Records the launches between two events, which become nodes of the graph.
  Status PutOnStream(const TimedLaunch& launch) {
    MARLIN_RETURN_IF_ERROR(
        Check(cudaEventRecordWithFlags(begin_.get(), stream_, cudaEventRecordExternal),
              "cudaEventRecordWithFlags"));
    // PDL overlaps a launch with a preceding kernel, not with an event.
    MARLIN_RETURN_IF_ERROR(Check(LaunchEmpty(stream_), "empty kernel"));
    for (int i = 0; i < count_; ++i) MARLIN_RETURN_IF_ERROR(launch(i, stream_));
    return Check(cudaEventRecordWithFlags(end_.get(), stream_, cudaEventRecordExternal),
                 "cudaEventRecordWithFlags");
  }

  cudaStream_t stream_;
  int count_;
  Event begin_;
  Event end_;
  Executable executable_;
};

class StreamTimer final : public GraphTimer {
 public:
  StreamTimer(OwnedStream stream, int sm_count) : stream_(std::move(stream)), sm_count_(sm_count) {}

  Result<std::unique_ptr<CapturedLaunches>> Capture(int count, const TimedLaunch& launch) override {
    MARLIN_RETURN_IF_ERROR(launch(0, stream_.get()));
    MARLIN_RETURN_IF_ERROR(Check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"));
    MARLIN_ASSIGN_OR_RETURN(Event begin, MakeEvent());
    MARLIN_ASSIGN_OR_RETURN(Event end, MakeEvent());
    auto graph =
        std::make_unique<CapturedGraph>(stream_.get(), count, std::move(begin), std::move(end));
    MARLIN_RETURN_IF_ERROR(graph->Capture(launch));
    return std::unique_ptr<CapturedLaunches>(std::move(graph));
  }

  Status LaunchProbe(Probe probe, const void* data, int64_t bytes, void* stream) override {
    auto* const on = static_cast<cudaStream_t>(stream);
    switch (probe) {
      case Probe::kEmpty:
        return Check(LaunchEmpty(on), "empty kernel");
      case Probe::kReadBulk:
        return Check(LaunchReadBulk(data, bytes, sm_count_, on), "bulk read kernel");
      case Probe::kReadLoads:
        return Check(LaunchReadLoads(data, bytes, sm_count_, on), "load kernel");
    }
    return Status(Code::kInternal, "probe: unknown");
  }

 private:
  OwnedStream stream_;
  int sm_count_;
};

}  // namespace

Result<std::unique_ptr<GraphTimer>> OpenGraphTimer(std::string_view device) {
  int index = 0;
  const size_t colon = device.find(':');
  if (colon == std::string_view::npos) {
    MARLIN_RETURN_IF_ERROR(Check(cudaGetDevice(&index), "cudaGetDevice"));
  } else {
    const std::string_view digits = device.substr(colon + 1);
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), index);
    if (error != std::errc() || end != digits.end()) {
      return Status(Code::kInvalidArgument, "device: unknown name '" + std::string(device) + "'");
    }
  }
  MARLIN_RETURN_IF_ERROR(Check(cudaSetDevice(index), "cudaSetDevice"));
  int sm_count = 0;
  MARLIN_RETURN_IF_ERROR(
      Check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, index),
            "cudaDeviceGetAttribute"));
  cudaStream_t stream = nullptr;
  MARLIN_RETURN_IF_ERROR(Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                               "cudaStreamCreateWithFlags"));
  return std::unique_ptr<GraphTimer>(std::make_unique<StreamTimer>(OwnedStream(stream), sm_count));
}

}  // namespace marlin::cuda
