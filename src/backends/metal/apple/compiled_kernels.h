// Kernels compiled for this GPU: a library per source file, a pipeline per specialised function.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <tuple>

#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/apple/pipeline_archive.h"
#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

/// Thread-safe. A pipeline takes milliseconds to create if the build made a metallib or an earlier
/// process saved it; otherwise the first use of each source takes a second. Threads wait for each
/// other only where they need the same pipeline or source.
class CompiledKernels {
 public:
  CompiledKernels(NS::SharedPtr<MTL::Device> device, const KernelCache& cache);

  /// The pipeline lives as long as this object. Errors: kUnsupported (a compile error, with the
  /// compiler's text; no such function; more threads than this GPU has registers for).
  Result<MTL::ComputePipelineState*> PipelineOf(const KernelLaunch& launch);
  /// Compiles the pipelines of launches at the same time. PipelineOf has their errors.
  void Warm(std::span<const KernelLaunch> launches);

  /// Whether the build's metallib is used; otherwise the sources are compiled at run time.
  bool built() const { return built_.get() != nullptr; }

 private:
  /// Source and function are string literals, as launches have them.
  using PipelineKey = std::tuple<std::string_view, std::string_view, FunctionConstants>;
  /// An object that the first thread that needs it makes. After an error the next one tries again.
  template <typename T>
  struct Slot {
    std::mutex mutex;
    NS::SharedPtr<T> made;
  };
  using PipelineSlot = Slot<MTL::ComputePipelineState>;

  static PipelineKey KeyOf(const KernelLaunch& launch) {
    return {launch.source, launch.function, launch.constants};
  }
  PipelineSlot& SlotOf(const PipelineKey& key);
  Result<MTL::Library*> LibraryOf(std::string_view source);
  Result<NS::SharedPtr<MTL::Library>> Compile(std::string_view source) const;
  Result<NS::SharedPtr<MTL::ComputePipelineState>> MakePipeline(const KernelLaunch& launch);

  const NS::SharedPtr<MTL::Device> device_;
  const NS::SharedPtr<MTL::Library> built_;
  PipelineArchive archive_;
  std::mutex mutex_;  ///< Guards the maps, not what is in them.
  std::map<std::string_view, std::unique_ptr<Slot<MTL::Library>>> libraries_;
  std::map<PipelineKey, std::unique_ptr<PipelineSlot>> pipelines_;
};

}  // namespace marlin::metal
