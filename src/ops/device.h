// What a Device handle points at: a backend and its spare workspaces.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "marlin/device.h"
#include "plan/backend.h"
#include "plan/decoder_backend.h"

namespace marlin {

/// Scratch memory of a device. Where calls return before their work is done it belongs to the
/// stream of that work, and the next call on the stream may have it at once.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
  void* stream = nullptr;
};

class Device::Impl {
 public:
  explicit Impl(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  Backend& backend() const { return *backend_; }

  /// Takes a workspace of at least `bytes` from the spare ones, allocating only when none is large
  /// enough; one per concurrent call. Errors: kOutOfMemory, kDeviceLost.
  Result<Workspace> TakeWorkspace(void* stream, int64_t bytes);
  void ReturnWorkspace(const Workspace& workspace);

 private:
  std::unique_ptr<Backend> backend_;
  std::mutex mutex_;
  std::vector<Workspace> spare_;
};

/// The device's operations beside the products. Errors: kUnsupported where it has none.
Result<const DecoderBackend*> DecoderOf(const Device& device);

}  // namespace marlin
