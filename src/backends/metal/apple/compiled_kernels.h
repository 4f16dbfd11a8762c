// Kernels compiled for this GPU: a library per source file, a pipeline per specialised function.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>

#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

/// Thread-safe. A pipeline takes milliseconds to create if the build made a metallib; otherwise the
/// first use of each source takes a second, during which other threads wait.
class CompiledKernels {
 public:
  explicit CompiledKernels(NS::SharedPtr<MTL::Device> device);

  /// The pipeline lives as long as this object. Errors: kUnsupported (a compile error, with the
  /// compiler's text; no such function; more threads than this GPU has registers for).
  Result<MTL::ComputePipelineState*> PipelineOf(const KernelLaunch& launch);

  /// Whether the build's metallib is used; otherwise the sources are compiled at run time.
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
