#include "mlx_metal_stand_in.h"

#include <mlx/backend/metal/device.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "backends/metal/apple/launch_observer.h"
#include "mlx/gpu_memory.h"

namespace marlin::metal {

/// For the fake GPU; the driver, which would call it, is not part of this program.
LaunchObserver& TheLaunchObserver() {
  static LaunchObserver observer = nullptr;
  return observer;
}

}  // namespace marlin::metal

namespace mlx::core::metal {
namespace {

/// The GPU memory of an array. MLX's arrays are in host memory here.
struct Mirror {
  NS::SharedPtr<MTL::Buffer> buffer;
  void* data = nullptr;
  size_t bytes = 0;
  bool written = false;
  bool reached = false;  ///< By its address, which stays.
};
std::map<const void*, Mirror>& Mirrors() {
  static std::map<const void*, Mirror> mirrors;
  return mirrors;
}

std::map<std::string, NS::SharedPtr<MTL::Library>>& Libraries() {
  static std::map<std::string, NS::SharedPtr<MTL::Library>> libraries;
  return libraries;
}

std::map<std::string, NS::SharedPtr<MTL::ComputePipelineState>>& Pipelines() {
  static std::map<std::string, NS::SharedPtr<MTL::ComputePipelineState>> pipelines;
  return pipelines;
}

const NS::String* Text(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

[[noreturn]] void Fail(const std::string& what, NS::Error* error) {
  throw std::runtime_error(what + ": " +
                           (error ? error->localizedDescription()->utf8String() : "no reason"));
}

/// The launch that is being encoded, for the fake GPU, which compares its accesses with it.
marlin::metal::KernelLaunch& NextLaunch() {
  static marlin::metal::KernelLaunch launch;
  return launch;
}

/// Ends arguments where others in the same array begin, such as the parts of a workspace.
void EndAtOthers(marlin::metal::KernelLaunch* launch) {
  const auto begin_of = [](const marlin::metal::KernelBuffer& buffer) {
    return static_cast<const std::byte*>(buffer.data);
  };
  for (marlin::metal::KernelBuffer& buffer : launch->buffers) {
    for (const marlin::metal::KernelBuffer& other : launch->buffers) {
      const int64_t between = begin_of(other) - begin_of(buffer);
      if (between > 0) buffer.bytes = std::min(buffer.bytes, between);
    }
  }
}

/// Copies the array's content: it was not written before, or its writer has completed.
Mirror& MirrorOf(Device& device, const array& a) {
  Mirror& mirror = Mirrors()[a.data<void>()];
  if (mirror.reached) std::memcpy(mirror.buffer->contents(), mirror.data, mirror.bytes);
  if (mirror.buffer.get() != nullptr) return mirror;
  mirror.data = const_cast<void*>(a.data<void>());
  mirror.bytes = a.nbytes();
  mirror.buffer =
      NS::TransferPtr(device.mtl_device()->newBuffer(mirror.bytes, MTL::ResourceStorageModeShared));
  std::memcpy(mirror.buffer->contents(), mirror.data, mirror.bytes);
  return mirror;
}

}  // namespace

ResidencySets::ResidencySets(MTL::Device* device) : device_(device) {}
ResidencySets::~ResidencySets() = default;

Device::Device()
    : device_(NS::TransferPtr(MTL::CreateSystemDefaultDevice())), residency_sets_(device_.get()) {}
Device::~Device() = default;

MTL::Library* Device::get_library(const std::string& name, const CompileOptions& /*options*/,
                                  const std::function<std::string(void)>& builder) {
  NS::SharedPtr<MTL::Library>& library = Libraries()[name];
  if (library.get() != nullptr) return library.get();
  const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  options->setFastMathEnabled(false);
  NS::Error* error = nullptr;
  library = NS::TransferPtr(device_->newLibrary(Text(builder()), options.get(), &error));
  if (library.get() == nullptr) Fail(name, error);
  return library.get();
}

MTL::ComputePipelineState* Device::get_kernel(const std::string& base_name, MTL::Library* library,
                                              const std::string& hash_name,
                                              const MTLFCList& constants,
                                              const std::vector<MTL::Function*>& /*linked*/) {
  NS::SharedPtr<MTL::ComputePipelineState>& pipeline = Pipelines()[hash_name];
  if (pipeline.get() != nullptr) return pipeline.get();
  const auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  for (const auto& [value, type, index] : constants) values->setConstantValue(value, type, index);
  NS::Error* error = nullptr;
  const auto function =
      NS::TransferPtr(library->newFunction(Text(base_name), values.get(), &error));
  if (function.get() == nullptr) Fail(base_name, error);
  pipeline = NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
  if (pipeline.get() == nullptr) Fail(base_name, error);
  return pipeline.get();
}

CommandEncoder::CommandEncoder(Device& device, int /*index*/, ResidencySets& sets)
    : device_(device),
      queue_(NS::TransferPtr(device.mtl_device()->newCommandQueue())),
      buffer_(NS::RetainPtr(queue_->commandBuffer())),
      residency_sets_(sets) {}
CommandEncoder::~CommandEncoder() = default;

MTL::ComputeCommandEncoder* CommandEncoder::get_command_encoder() {
  if (encoder_.get() == nullptr) {
    encoder_ = NS::RetainPtr(buffer_->computeCommandEncoder(MTL::DispatchTypeSerial));
  }
  return encoder_.get();
}

void CommandEncoder::set_input_array(const array& a, int index, int64_t offset) {
  const Mirror& mirror = MirrorOf(device_, a);
  const auto* const data = static_cast<const std::byte*>(mirror.buffer->contents()) + offset;
  NextLaunch().buffers.push_back({index, data, static_cast<int64_t>(mirror.bytes) - offset});
  get_command_encoder()->setBuffer(mirror.buffer.get(), static_cast<NS::UInteger>(offset),
                                   static_cast<NS::UInteger>(index));
}

void CommandEncoder::set_output_array(array& a, int index, int64_t offset) {
  MirrorOf(device_, a).written = true;
  set_input_array(a, index, offset);
  NextLaunch().buffers.back().written = true;
}

void CommandEncoder::add_temporary(array a) { temporaries_.push_back(std::move(a)); }

void CommandEncoder::dispatch_threadgroups(MTL::Size groups, MTL::Size threads) {
  marlin::metal::KernelLaunch launch = std::exchange(NextLaunch(), {});
  EndAtOthers(&launch);
  for (const auto& [data, mirror] : Mirrors()) {
    if (!mirror.reached) continue;
    launch.addressed.push_back(
        {mirror.buffer->contents(), static_cast<int64_t>(mirror.bytes), false});
  }
  marlin::metal::TheLaunchObserver()(launch);
  get_command_encoder()->dispatchThreadgroups(groups, threads);
}

void CommandEncoder::synchronize() {
  if (encoder_.get() == nullptr) return;
  encoder_->endEncoding();
  buffer_->commit();
  buffer_->waitUntilCompleted();
  if (buffer_->status() != MTL::CommandBufferStatusCompleted) Fail("run", buffer_->error());
  for (const auto& [data, mirror] : Mirrors()) {
    if (mirror.written) std::memcpy(mirror.data, mirror.buffer->contents(), mirror.bytes);
  }
  std::erase_if(Mirrors(), [](const auto& each) { return !each.second.reached; });
  encoder_.reset();
  buffer_ = NS::RetainPtr(queue_->commandBuffer());
  temporaries_.clear();
}

Device& device(mlx::core::Device /*device*/) {
  static auto* const made = new Device;
  return *made;
}

CommandEncoder& get_command_encoder(Stream /*stream*/) {
  Device& made = device(mlx::core::Device::gpu);
  static auto* const encoder = new CommandEncoder(made, 0, made.residency_sets());
  return *encoder;
}

}  // namespace mlx::core::metal

namespace marlin::python {

MTL::Buffer* BufferOf(const mlx::core::array& array) {
  namespace metal = mlx::core::metal;
  metal::Mirror& mirror = metal::MirrorOf(metal::device(mlx::core::Device::gpu), array);
  mirror.reached = true;
  return mirror.buffer.get();
}

}  // namespace marlin::python

namespace marlin::mlx_metal {

void Evaluate(const std::function<void()>& encode) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  encode();
  mlx::core::metal::get_command_encoder(mlx::core::default_stream(mlx::core::Device::cpu))
      .synchronize();
}

}  // namespace marlin::mlx_metal
