// The residency set of the driver's buffers.
#pragma once

#include <mutex>

#include "backends/metal/apple/metal_cpp.h"

namespace marlin::metal {

/// Keeps buffers resident for work on the queue if the system has residency sets (macOS 15), up to
/// its recommended working-set size: otherwise the first command buffer after every pause would
/// have to make the prepared weights resident again. Thread-safe.
class ResidentBuffers {
 public:
  ResidentBuffers(MTL::Device* device, MTL::CommandQueue* queue);

  /// False: there is no set, or no room; work must then name the buffer. Work may use it after the
  /// next Commit.
  bool Add(MTL::Buffer* buffer);
  /// Precondition: Add was true. No work uses the buffer.
  void Remove(MTL::Buffer* buffer);
  /// To be called before a command buffer is committed. Cheap if nothing was added.
  void Commit();

  /// Null: the system has none.
  MTL::ResidencySet* set() const { return set_.get(); }

 private:
  MTL::Device* const device_;
  const NS::SharedPtr<MTL::ResidencySet> set_;
  std::mutex mutex_;
  bool added_ = false;  ///< Since the last commit.
};

}  // namespace marlin::metal
