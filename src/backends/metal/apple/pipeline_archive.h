// Pipelines that earlier processes compiled.
#pragma once

#include <cstdint>
#include <mutex>

#include "backends/metal/apple/kernel_cache.h"
#include "backends/metal/apple/metal_cpp.h"

namespace marlin::metal {

/// An MTLBinaryArchive in a cache. Thread-safe. Where it cannot be read or written, pipelines are
/// compiled.
class PipelineArchive {
 public:
  PipelineArchive(NS::SharedPtr<MTL::Device> device, const KernelCache& cache);
  /// Saves what was added.
  ~PipelineArchive();
  PipelineArchive(const PipelineArchive&) = delete;
  PipelineArchive& operator=(const PipelineArchive&) = delete;

  /// The pipeline of a descriptor, from the archive or compiled and added to it. Null with an error
  /// if it does not compile.
  NS::SharedPtr<MTL::ComputePipelineState> Make(MTL::ComputePipelineDescriptor* descriptor,
                                                NS::Error** error);

 private:
  void Save();

  const NS::SharedPtr<MTL::Device> device_;
  const KernelCache& cache_;
  std::mutex mutex_;
  NS::SharedPtr<MTL::BinaryArchive> archive_;  ///< Null: there is no folder for it.
  int64_t added_ = 0;                          ///< Since it was saved.
  int64_t save_after_;
};

}  // namespace marlin::metal
