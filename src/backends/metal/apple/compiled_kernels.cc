#include "backends/metal/apple/compiled_kernels.h"

#include <dispatch/dispatch.h>
#include <fmt/core.h>

#include <thread>
#include <utility>
#include <vector>

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

CompiledKernels::CompiledKernels(NS::SharedPtr<MTL::Device> device, const KernelCache& cache)
    : device_(std::move(device)),
      built_(LoadBuiltLibrary(device_.get())),
      archive_(device_, cache) {}

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
  Slot<MTL::Library>* slot = nullptr;
  {
    const std::lock_guard lock(mutex_);
    auto& found = libraries_[source];
    if (found == nullptr) found = std::make_unique<Slot<MTL::Library>>();
    slot = found.get();
  }
  const std::lock_guard lock(slot->mutex);
  if (slot->made.get() == nullptr) {
    MARLIN_ASSIGN_OR_RETURN(slot->made, Compile(source));
  }
  return slot->made.get();
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
  const NS::SharedPtr<MTL::ComputePipelineDescriptor> descriptor =
      NS::TransferPtr(MTL::ComputePipelineDescriptor::alloc()->init());
  descriptor->setComputeFunction(function.get());
  descriptor->setLabel(MakeText(std::string(launch.function)));
  NS::SharedPtr<MTL::ComputePipelineState> pipeline = archive_.Make(descriptor.get(), &error);
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

CompiledKernels::PipelineSlot& CompiledKernels::SlotOf(const PipelineKey& key) {
  const std::lock_guard lock(mutex_);
  auto& found = pipelines_[key];
  if (found == nullptr) found = std::make_unique<PipelineSlot>();
  return *found;
}

Result<MTL::ComputePipelineState*> CompiledKernels::PipelineOf(const KernelLaunch& launch) {
  PipelineSlot& slot = SlotOf(KeyOf(launch));
  const std::lock_guard lock(slot.mutex);
  if (slot.made.get() == nullptr) {
    const AutoreleaseScope scope;
    MARLIN_ASSIGN_OR_RETURN(slot.made, MakePipeline(launch));
  }
  MTL::ComputePipelineState* const pipeline = slot.made.get();
  if (launch.threads > pipeline->maxTotalThreadsPerThreadgroup()) {
    return Status(
        Code::kUnsupported,
        fmt::format("metal: {}: {} threads per threadgroup, this GPU takes {}", launch.function,
                    launch.threads, pipeline->maxTotalThreadsPerThreadgroup()));
  }
  return pipeline;
}

void CompiledKernels::Warm(std::span<const KernelLaunch> launches) {
  std::map<PipelineKey, const KernelLaunch*> missing;
  {
    const std::lock_guard lock(mutex_);
    for (const KernelLaunch& launch : launches) {
      if (!pipelines_.contains(KeyOf(launch))) missing.emplace(KeyOf(launch), &launch);
    }
  }
  if (missing.size() < 2) return;
  std::vector<std::thread> threads;
  for (const auto& [key, launch] : missing) {
    threads.emplace_back([this, of = launch] { (void)PipelineOf(*of); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace marlin::metal
