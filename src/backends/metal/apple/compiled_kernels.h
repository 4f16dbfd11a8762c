// Kernels compiled for this GPU: libraries of sources, and pipelines of their functions.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>

#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/driver.h"

namespace marlin::metal {

/// Thread-safe. Compiling takes milliseconds where the build made a library, and else the first
/// time a second for each source, during which other threads wait.
class CompiledKernels {
 public:
  explicit CompiledKernels(NS::SharedPtr<MTL::Device> device);

  /// Lives as long as this. Errors: kUnsupported with the compiler's text, for a function that the
  /// source does not have, and for more threads than this GPU has registers for.
  Result<MTL::ComputePipelineState*> PipelineOf(const KernelLaunch& launch);

  /// Whether the library that the build made is what runs; else the sources are compiled here.
  bool built() const { return built_.get() != nullptr; }

 private:
  using PipelineKey = std::tuple<std::string, std::string, FunctionConstants>;

  Result<MTL::Library*> LibraryOf(std::string_view source);
  Result<NS::SharedPtr<MTL::Library>> Compile(std::string_view source) const;
  Result<NS::SharedPtr<MTL::ComputePipelineState>> MakePipeline(const KernelLaunch& launch);

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::Library> built_;
  std::mutex mutex_;
  std::map<std::string, NS::SharedPtr<MTL::Library>, std::less<>> libraries_;
  std::map<PipelineKey, NS::SharedPtr<MTL::ComputePipelineState>> pipelines_;
};

}  // namespace marlin::metal
