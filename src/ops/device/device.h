// The implementation of Device: a backend and its cached workspaces.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "base/macros.h"
#include "marlin/device.h"
#include "ops/device/host_decoder.h"
#include "ops/device/tuning_file.h"
#include "plan/gemm/backend.h"
#include "plan/gemm/host_staging.h"
#include "plan/step/decoder_backend.h"

namespace marlin {

/// Scratch memory of a device. If calls return before their work is done, it belongs to that work's
/// stream, and the next call on the same stream may reuse it at once.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
  void* stream = nullptr;
};

class Device::Impl {
 public:
  explicit Impl(std::unique_ptr<Backend> backend, Tuning tuning = {})
      : backend_(std::move(backend)), tuning_(std::move(tuning)) {}
  /// For a device that shares the host's memory: the host runs the operations other than GEMMs.
  void AddHost(std::unique_ptr<Backend> host) {
    host_decoder_ = std::make_unique<HostDecoder>(std::move(host), *backend_);
  }
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  Backend& backend() const { return *backend_; }
  /// Null: GEMMs only.
  const DecoderBackend* decoder() const {
    return host_decoder_ != nullptr ? host_decoder_.get() : backend_->decoder();
  }
  /// The device to try where this one lacks an operation; empty for a device opened by name, and
  /// for the last one of "auto". Opened by the first call, then shared. Errors: see
  /// Device::Open.
  Result<std::optional<Device>> Next();
  void SetNext(std::function<Result<Device>()> open) { open_next_ = std::move(open); }
  bool has_next() const { return open_next_ != nullptr; }
  /// DeviceInfo::passed_over.
  const std::string& passed_over() const { return passed_over_; }
  void SetPassedOver(std::string reason) { passed_over_ = std::move(reason); }
  /// DeviceInfo::host_operations.
  std::vector<HostOperation> HostOperations() const {
    return host_decoder_ == nullptr ? std::vector<HostOperation>()
                                    : host_decoder_->HostOperations();
  }
  const TuningTable& tuning() const { return tuning_.table; }
  const std::string& tuning_file() const { return tuning_.file; }

  /// Takes a workspace of at least `bytes` from the cache, allocating only when none is large
  /// enough; one per concurrent call. Errors: kOutOfMemory, kDeviceLost.
  Result<Workspace> TakeWorkspace(void* stream, int64_t bytes);
  void ReturnWorkspace(const Workspace& workspace);
  /// Frees the workspaces of a stream, whose work is done and which will have no more.
  void FreeWorkspaces(void* stream);

  /// Takes host memory of at least `bytes` that no copy uses any more, from the cache like a
  /// workspace. Errors: kOutOfMemory, kDeviceLost.
  Result<std::unique_ptr<HostStaging>> TakeStaging(int64_t bytes);
  /// Copies up to the last mark may still use it.
  void ReturnStaging(std::unique_ptr<HostStaging> staging);

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<HostDecoder> host_decoder_;
  const Tuning tuning_;
  std::mutex mutex_;
  std::vector<Workspace> spare_;
  std::vector<std::unique_ptr<HostStaging>> spare_staging_;
  std::string passed_over_;
  std::function<Result<Device>()> open_next_;
  std::mutex next_mutex_;  ///< Held while the next device opens, which takes seconds on a GPU.
  std::optional<Device> next_;
};

/// Opens the first available device, in order: kUnsupported moves on to the next candidate, any
/// other error ends the search. The remaining candidates become the device's Next, and
/// `passed_over` with the reasons of those that were not taken the device's. Errors: the last
/// candidate's. Precondition: at least one.
Result<Device> OpenFirst(std::vector<std::function<Result<Device>()>> candidates,
                         std::string passed_over = {});

/// The device's decoder operations. Errors: kUnsupported if it has none.
Result<const DecoderBackend*> DecoderOf(const Device& device);

/// Checks that the device has an operation. Errors: kUnsupported naming device and operation.
Status CheckHas(const Device& device, DecoderOperation operation);

/// Checks that the device has a kernel of it. Errors: kUnsupported naming device and operation.
Status CheckRunsItself(const Device& device, DecoderOperation operation);

/// Returns run(workspace) in a workspace of the device of `bytes`; null if that is 0.
template <typename Run>
Status RunInWorkspace(const Device& device, void* stream, int64_t bytes, const Run& run) {
  if (bytes == 0) return run(nullptr);
  MARLIN_ASSIGN_OR_RETURN(const Workspace workspace,
                          Internals::Impl(device).TakeWorkspace(stream, bytes));
  Status status = run(workspace.data);
  Internals::Impl(device).ReturnWorkspace(workspace);
  return status;
}

/// Runs a validated call in `given`, which has the call's WorkspaceBytes, or if it is null in a
/// workspace of the device.
template <typename Call>
Status RunOperation(const Device& device, const Call& call, void* stream, void* given = nullptr) {
  const DecoderBackend* const decoder = Internals::Impl(device).decoder();
  if (decoder == nullptr || !decoder->Has(kOperationOf<Call>)) {
    return CheckHas(device, kOperationOf<Call>);
  }
  if (given != nullptr) return decoder->Run(call, {stream, given});
  return RunInWorkspace(device, stream, decoder->WorkspaceBytes(call), [&](void* workspace) {
    return decoder->Run(call, {stream, workspace});
  });
}

}  // namespace marlin
