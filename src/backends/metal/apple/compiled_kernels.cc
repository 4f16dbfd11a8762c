#include "backends/metal/apple/compiled_kernels.h"

#include <dispatch/dispatch.h>
#include <fmt/core.h>

#include <utility>

#include "backends/metal/apple/built_library.h"
#include "backends/metal/plan/kernel_text.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Loads the metallib in the binary; null if there is none or it needs a newer system. The sources
/// are then compiled at run time.
NS::SharedPtr<MTL::Library> LoadBuiltLibrary(MTL::Device* device) {
  const std::span<const uint8_t> bytes = BuiltLibrary();
  if (bytes.empty()) return {};
  const AutoreleaseScope scope;
  dispatch_data_t data =
      dispatch_data_create(bytes.data(), bytes.size(), nullptr, DISPATCH_DATA_DESTRUCTOR_DEFAULT);
  NS::Error* error = nullptr;
  NS::SharedPtr<MTL::Library> library = NS::TransferPtr(device->newLibrary(data, &error));
  dispatch_release(data);
  return library;
}

/// The options of the build: results must not depend on where a kernel was compiled.
NS::SharedPtr<MTL::CompileOptions> StrictOptions() {
  NS::SharedPtr<MTL::CompileOptions> options =
      NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  if (Responds::To(options.get(), "setMathMode:")) {  // macOS 15.
    options->setMathMode(MTL::MathModeSafe);
  } else {
    options->setFastMathEnabled(false);
  }
  return options;
}

}  // namespace

CompiledKernels::CompiledKernels(NS::SharedPtr<MTL::Device> device)
    : device_(std::move(device)), built_(LoadBuiltLibrary(device_.get())) {}

Result<NS::SharedPtr<MTL::Library>> CompiledKernels::Compile(std::string_view source) const {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, KernelText(source));
  const NS::SharedPtr<MTL::CompileOptions> options = StrictOptions();
  NS::Error* error = nullptr;
  NS::SharedPtr<MTL::Library> library =
      NS::TransferPtr(device_->newLibrary(MakeText(text), options.get(), &error));
  // If there is a library, the error holds warnings only.
  if (library.get() != nullptr) return library;
  return Status(Code::kUnsupported,
                fmt::format("metal: {} does not compile: {}", source, TextOf(error)));
}

Result<MTL::Library*> CompiledKernels::LibraryOf(std::string_view source) {
  if (built()) return built_.get();
  auto found = libraries_.find(source);
  if (found == libraries_.end()) {
    MARLIN_ASSIGN_OR_RETURN(NS::SharedPtr<MTL::Library> library, Compile(source));
    found = libraries_.emplace(source, std::move(library)).first;
  }
  return found->second.get();
}

Result<NS::SharedPtr<MTL::ComputePipelineState>> CompiledKernels::MakePipeline(
    const KernelLaunch& launch) {
  MARLIN_ASSIGN_OR_RETURN(MTL::Library * library, LibraryOf(launch.source));
  const NS::SharedPtr<MTL::FunctionConstantValues> values =
      NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  // Metal ignores constants that the function does not use.
  for (size_t i = 0; i < launch.constants.size(); ++i) {
    values->setConstantValue(&launch.constants[i], MTL::DataTypeInt, i);
  }
  NS::Error* error = nullptr;
  const NS::SharedPtr<MTL::Function> function = NS::TransferPtr(
      library->newFunction(MakeText(std::string(launch.function)), values.get(), &error));
  if (function.get() == nullptr) {
    return Status(Code::kUnsupported, fmt::format("metal: {}: no function {}: {}", launch.source,
                                                  launch.function, TextOf(error)));
  }
  NS::SharedPtr<MTL::ComputePipelineState> pipeline =
      NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
  if (pipeline.get() == nullptr) {
    return Status(Code::kUnsupported,
                  fmt::format("metal: {}: no pipeline: {}", launch.function, TextOf(error)));
  }
  if (pipeline->threadExecutionWidth() != kernels::kLanes) {
    return Status(Code::kUnsupported,
                  fmt::format("metal: {}: expected simdgroups of {} threads, got {}",
                              launch.function, kernels::kLanes, pipeline->threadExecutionWidth()));
  }
  return pipeline;
}

Result<MTL::ComputePipelineState*> CompiledKernels::PipelineOf(const KernelLaunch& launch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const PipelineKey key{launch.source, launch.function, launch.constants};
  auto found = pipelines_.find(key);
  if (found == pipelines_.end()) {
    const AutoreleaseScope scope;
    MARLIN_ASSIGN_OR_RETURN(NS::SharedPtr<MTL::ComputePipelineState> pipeline,
                            MakePipeline(launch));
    found = pipelines_.emplace(key, std::move(pipeline)).first;
  }
  MTL::ComputePipelineState* const pipeline = found->second.get();
  if (launch.threads > pipeline->maxTotalThreadsPerThreadgroup()) {
    return Status(
        Code::kUnsupported,
        fmt::format("metal: {}: {} threads per threadgroup, this GPU takes {}", launch.function,
                    launch.threads, pipeline->maxTotalThreadsPerThreadgroup()));
  }
  return pipeline;
}

}  // namespace marlin::metal
