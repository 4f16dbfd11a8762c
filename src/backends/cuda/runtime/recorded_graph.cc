#include "backends/cuda/runtime/recorded_graph.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// Keeps its stream: the workspaces of the captured work belong to that stream alone.
class RecordedGraph final : public RecordedWork {
 public:
  explicit RecordedGraph(std::shared_ptr<DeviceHandle> device) : device_(std::move(device)) {}
  ~RecordedGraph() override {
    const DeviceScope scope(device_->index);
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  RecordedGraph(const RecordedGraph&) = delete;
  RecordedGraph& operator=(const RecordedGraph&) = delete;

  void* stream() const override { return stream_; }

  /// Runs the work once, so that workspaces are allocated and modules loaded before the capture.
  Status Run(const std::function<Status(void*)>& enqueue) {
    MARLIN_RETURN_IF_ERROR(Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                                 "cudaStreamCreateWithFlags"));
    MARLIN_RETURN_IF_ERROR(enqueue(stream_));
    return Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  Status Capture(const std::function<Status(void*)>& enqueue) {
    MARLIN_RETURN_IF_ERROR(Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
                                 "cudaStreamBeginCapture"));
    const Status captured = enqueue(stream_);
    cudaGraph_t graph = nullptr;
    const Status ended = Check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    Status made = captured.ok() ? ended : captured;
    if (made.ok()) {
      made = Check(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
    return made;
  }

  Status Launch(void* stream) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    return Check(cudaGraphLaunch(executable_, static_cast<cudaStream_t>(stream)),
                 "cudaGraphLaunch");
  }

 private:
  Status Check(cudaError_t error, const char* what) const {
    return device_->errors.Check(error, what);
  }

  std::shared_ptr<DeviceHandle> device_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<RecordedWork>> RecordGraph(
    const std::shared_ptr<DeviceHandle>& device,
    const std::function<Status(void* stream)>& enqueue) {
  MARLIN_RETURN_IF_ERROR(device->errors.Lost());
  const DeviceScope scope(device->index);
  auto recorded = std::make_unique<RecordedGraph>(device);
  // Work that earlier calls put on other streams comes first.
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
  MARLIN_RETURN_IF_ERROR(recorded->Run(enqueue));
  const Status captured = recorded->Capture(enqueue);
  if (captured.code() == Code::kDeviceLost) return captured;
  if (!captured.ok()) return std::unique_ptr<RecordedWork>();
  return std::unique_ptr<RecordedWork>(std::move(recorded));
}

}  // namespace marlin::cuda
