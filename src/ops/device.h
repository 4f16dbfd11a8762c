// What a Device handle points at: a backend and its spare workspaces.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/aligned_buffer.h"
#include "marlin/device.h"
#include "plan/backend.h"

namespace marlin {

class Device::Impl {
 public:
  explicit Impl(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
  Backend& backend() const { return *backend_; }

  /// Takes a workspace of at least `bytes` from the spare ones, allocating only when none is large
  /// enough; one per concurrent call. Errors: kOutOfMemory.
  Result<AlignedBuffer> TakeWorkspace(int64_t bytes);
  void ReturnWorkspace(AlignedBuffer workspace);

 private:
  std::unique_ptr<Backend> backend_;
  std::mutex mutex_;
  std::vector<AlignedBuffer> spare_;
};

}  // namespace marlin
