#include "backends/metal/apple/apple_driver.h"

#include <fmt/core.h>

#include <array>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "backends/metal/apple/caller_memory.h"
#include "backends/metal/apple/compiled_kernels.h"
#include "backends/metal/apple/device_memory.h"
#include "backends/metal/apple/gpu_cores.h"
#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/apple/submitted_work.h"
#include "backends/metal/runtime/driver.h"
#include "backends/metal/self_test.h"
#include "base/environment.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Upper limit of setBytes.
constexpr size_t kMostBytesInline = 4096;
static_assert(sizeof(kernels::Parameters) <= kMostBytesInline);

/// The system's GPU, or null.
NS::SharedPtr<MTL::Device> FindDevice() {
  const AutoreleaseScope scope;
  if (MTL::Device* device = MTL::CreateSystemDefaultDevice(); device != nullptr) {
    return NS::TransferPtr(device);
  }
  // Processes without a window-server session have no default device.
  const NS::SharedPtr<NS::Array> all = NS::TransferPtr(MTL::CopyAllDevices());
  if (all.get() == nullptr || all->count() == 0) return {};
  return NS::RetainPtr(all->object<MTL::Device>(0));
}

/// The newest GPU family that the device supports; 0: not an Apple GPU.
int FamilyOf(MTL::Device* device) {
  constexpr auto kFirst = static_cast<int>(MTL::GPUFamilyApple1);
  constexpr int kNewest =
      12;  // supportsFamily is false for families that the system does not know.
  for (int family = kNewest; family > 0; --family) {
    if (device->supportsFamily(static_cast<MTL::GPUFamily>(kFirst + family - 1))) return family;
  }
  return 0;
}

/// The GPU family of the M1. A virtual machine's GPU reports an older one and may still run all
/// kernels, so the self-test decides.
constexpr int kFirstMacFamily = 7;

/// The feature by which bench/metal_record.py tells a virtual machine's GPU.
constexpr const char* kVirtualGpu = "virtual GPU";

/// The buffers that ranges are in.
struct ReachedBuffers final : ReachedMemory {
  using ReachedMemory::ReachedMemory;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers;
};

/// A launch with its pipeline and buffers resolved.
struct BoundLaunch {
  const KernelLaunch* launch = nullptr;
  MTL::ComputePipelineState* pipeline = nullptr;
  std::vector<BufferPlace> buffers;  ///< Parallel to launch->buffers.
};

class AppleDriver final : public Driver {
 public:
  explicit AppleDriver(NS::SharedPtr<MTL::Device> device)
      : device_(std::move(device)),
        queue_(NS::TransferPtr(device_->newCommandQueue())),
        kernels_(device_),
        memory_(device_, queue_.get()) {}
  AppleDriver(const AppleDriver&) = delete;
  AppleDriver& operator=(const AppleDriver&) = delete;
  ~AppleDriver() override {
    if (queue_.get() != nullptr) (void)work_.Wait(nullptr);
  }

  /// Errors: as OpenAppleDriver.
  Status Start(bool self_test) {
    const AutoreleaseScope scope;
    model_ = TextOf(device_->name());
    family_ = FamilyOf(device_.get());
    if (queue_.get() == nullptr) {
      return Status(Code::kUnsupported,
                    fmt::format("metal: {}: cannot create a command queue", model_));
    }
    cores_ = CountCores(device_->registryID(), model_);
    MARLIN_ASSIGN_OR_RETURN(unread_, memory_.Allocate(1));
    if (!self_test) return Status();
    return Test();
  }

  /// Only for lists: nothing has been tested.
  void TakeAsTested() { known_fragments_ = listed_ = true; }

  DriverInfo Info() const override;
  DeviceShape Shape() const override { return {cores_.cores, known_fragments_}; }
  Status Run(std::span<const KernelLaunch> launches, void* stream) override {
    return RunAndCheck(launches, stream, nullptr);
  }
  Status RunAndCheck(std::span<const KernelLaunch> launches, void* stream,
                     const ResultCheck& check) override;
  Status Synchronize(void* stream) override {
    return work_.Wait(static_cast<const MTL::CommandQueue*>(stream));
  }
  bool calls_block() const override { return false; }

  Result<void*> Allocate(int64_t bytes) override {
    MARLIN_RETURN_IF_ERROR(work_.Check());
    return memory_.Allocate(bytes);
  }
  void Free(void* data) override { memory_.Free(data); }
  uint64_t AddressOf(const void* data) const override;
  std::shared_ptr<const ReachedMemory> Reach(std::span<const MemoryRange> ranges) const override;

 private:
  Status Test();
  Status FindCallerMemory(std::span<const KernelLaunch> launches, CallerMemory* caller) const;
  Result<std::vector<BoundLaunch>> Bind(std::span<const KernelLaunch> launches,
                                        const CallerMemory& caller);
  Result<BufferPlace> PlaceOf(const KernelBuffer& buffer, const CallerMemory& caller) const;
  Result<NS::SharedPtr<MTL::CommandBuffer>> Encode(MTL::CommandQueue* queue,
                                                   std::span<const BoundLaunch> launches);

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  CompiledKernels kernels_;
  DeviceMemory memory_;
  SubmittedWork work_;
  void* unread_ = nullptr;  ///< Bound in place of absent buffers; kernels do not read it.
  std::string model_;
  int family_ = 0;
  CoreCount cores_;
  bool known_fragments_ = false;  ///< Set by the self-test.
  bool keeps_subnormals_ = false;
  bool listed_ = false;
};

/// Runs the self-test. Errors: kUnsupported.
Status AppleDriver::Test() {
  const Result<SelfTest> result = RunSelfTest(*this);
  const std::string wrong = result.ok() ? result->Wrong() : result.status().message();
  if (!wrong.empty()) {
    const char* const hint =
        family_ < kFirstMacFamily ? "needs a GPU of Apple silicon (M1 or newer): " : "";
    return Status(result.ok() ? Code::kUnsupported : result.status().code(),
                  fmt::format("metal: {}: {}self-test: {}", model_, hint, wrong));
  }
  known_fragments_ = result->known_fragments;
  keeps_subnormals_ = result->keeps_subnormals;
  return Status();
}

DriverInfo AppleDriver::Info() const {
  const AutoreleaseScope scope;
  constexpr double kGiB = 1 << 30;
  DriverInfo info;
  info.name = "metal";
  info.model = model_;
  const NS::ProcessInfo* const process = NS::ProcessInfo::processInfo();
  info.features = {
      fmt::format("GPU family Apple{}", family_),
      fmt::format("{} cores ({})", cores_.cores, cores_.origin),
      fmt::format("macOS {}", TextOf(process->operatingSystemVersionString())),
      fmt::format("{:.0f} GiB unified memory",
                  static_cast<double>(process->physicalMemory()) / kGiB),
      fmt::format("{:.0f} GiB for the GPU",
                  static_cast<double>(device_->recommendedMaxWorkingSetSize()) / kGiB),
      fmt::format("{} KiB threadgroup memory", device_->maxThreadgroupMemoryLength() / 1024),
      kernels_.built() ? "kernels compiled by the build" : "kernels compiled here",
      listed_            ? "tested when it is opened for work"
      : known_fragments_ ? "known matrix fragments"
                         : "unknown matrix fragments",
  };
  if (family_ < kFirstMacFamily || model_.find("Paravirtual") != std::string::npos) {
    info.features.emplace_back(kVirtualGpu);
  }
  if (keeps_subnormals_) info.features.emplace_back("subnormal numbers");
  if (memory_.keeps_resident()) info.features.emplace_back("residency set");
  return info;
}

uint64_t AppleDriver::AddressOf(const void* data) const {
  const auto place = memory_.Find(data, 1);
  if (!place.ok() || !*place) return 0;
  return (*place)->buffer->gpuAddress() + (*place)->offset;
}

std::shared_ptr<const ReachedMemory> AppleDriver::Reach(std::span<const MemoryRange> ranges) const {
  auto reached = std::make_shared<ReachedBuffers>(ranges);
  std::set<const MTL::Buffer*> known;
  for (const MemoryRange& range : ranges) {
    const auto place = memory_.Find(range.data, range.bytes);
    if (!place.ok() || !*place || !known.insert((*place)->buffer.get()).second) continue;
    reached->buffers.push_back((*place)->buffer);
  }
  return reached;
}

/// Collects the buffers that lie in none of this driver's allocations.
Status AppleDriver::FindCallerMemory(std::span<const KernelLaunch> launches,
                                     CallerMemory* caller) const {
  for (const KernelLaunch& launch : launches) {
    for (const KernelBuffer& buffer : launch.buffers) {
      if (buffer.data == nullptr || buffer.bytes == 0) continue;
      MARLIN_ASSIGN_OR_RETURN(const auto place, memory_.Find(buffer.data, buffer.bytes));
      if (!place) caller->Add(buffer);
    }
  }
  return Status();
}

Result<BufferPlace> AppleDriver::PlaceOf(const KernelBuffer& buffer,
                                         const CallerMemory& caller) const {
  const bool empty = buffer.data == nullptr || buffer.bytes == 0;
  const void* const data = empty ? unread_ : buffer.data;
  MARLIN_ASSIGN_OR_RETURN(const auto place, memory_.Find(data, empty ? 1 : buffer.bytes));
  return place ? *place : caller.Find(data);
}

Result<std::vector<BoundLaunch>> AppleDriver::Bind(std::span<const KernelLaunch> launches,
                                                   const CallerMemory& caller) {
  std::vector<BoundLaunch> all;
  for (const KernelLaunch& launch : launches) {
    BoundLaunch bound;
    bound.launch = &launch;
    MARLIN_ASSIGN_OR_RETURN(bound.pipeline, kernels_.PipelineOf(launch));
    for (const KernelBuffer& buffer : launch.buffers) {
      MARLIN_ASSIGN_OR_RETURN(BufferPlace place, PlaceOf(buffer, caller));
      bound.buffers.push_back(std::move(place));
    }
    all.push_back(std::move(bound));
  }
  return all;
}

/// Makes memory resident, and tells Metal that it is read, for hazards with earlier work.
void UseReached(const ReachedMemory& memory, MTL::ComputeCommandEncoder* encoder) {
  const auto& buffers = static_cast<const ReachedBuffers&>(memory).buffers;
  std::vector<const MTL::Resource*> resources;
  resources.reserve(buffers.size());
  for (const auto& buffer : buffers) resources.push_back(buffer.get());
  if (resources.empty()) return;
  encoder->useResources(resources.data(), resources.size(), MTL::ResourceUsageRead);
}

Result<NS::SharedPtr<MTL::CommandBuffer>> AppleDriver::Encode(
    MTL::CommandQueue* queue, std::span<const BoundLaunch> launches) {
  // A command buffer retains the buffers that it references until it has completed.
  NS::SharedPtr<MTL::CommandBuffer> commands = NS::RetainPtr(queue->commandBuffer());
  // Serial: every dispatch sees the writes of the dispatches before it.
  MTL::ComputeCommandEncoder* const encoder =
      commands.get() == nullptr ? nullptr
                                : commands->computeCommandEncoder(MTL::DispatchTypeSerial);
  if (encoder == nullptr) {
    return Status(Code::kDeviceLost,
                  fmt::format("metal: {}: cannot create a command buffer", model_));
  }
  const ReachedMemory* reached = nullptr;
  for (const BoundLaunch& bound : launches) {
    const KernelLaunch& launch = *bound.launch;
    encoder->setComputePipelineState(bound.pipeline);
    for (size_t i = 0; i < bound.buffers.size(); ++i) {
      const auto index = static_cast<NS::UInteger>(launch.buffers[i].index);
      encoder->setBuffer(bound.buffers[i].buffer.get(), bound.buffers[i].offset, index);
    }
    const std::span<const std::byte> parameters = ParameterBytes(launch);
    encoder->setBytes(parameters.data(), parameters.size(), MARLIN_BUFFER_PARAMETERS);
    // It stays resident until the encoder ends.
    if (launch.reached != nullptr && launch.reached.get() != reached) {
      reached = launch.reached.get();
      UseReached(*launch.reached, encoder);
    }
    const auto& groups = launch.threadgroups;
    encoder->dispatchThreadgroups(MTL::Size(groups[0], groups[1], groups[2]),
                                  MTL::Size(launch.threads, 1, 1));
  }
  encoder->endEncoding();
  return commands;
}

Status AppleDriver::RunAndCheck(std::span<const KernelLaunch> launches, void* stream,
                                const ResultCheck& check) {
  MARLIN_RETURN_IF_ERROR(work_.Check());
  if (launches.empty()) return Status();
  const AutoreleaseScope scope;
  auto* const queue = stream == nullptr ? queue_.get() : static_cast<MTL::CommandQueue*>(stream);
  if (queue->device() != device_.get()) {
    return Status(Code::kInvalidArgument, "stream: a command queue of another device");
  }
  const auto caller = std::make_shared<CallerMemory>();
  MARLIN_RETURN_IF_ERROR(FindCallerMemory(launches, caller.get()));
  if (!caller->empty()) {
    MARLIN_RETURN_IF_ERROR(work_.WaitForConflicts(queue, *caller));
    MARLIN_RETURN_IF_ERROR(caller->Map(device_.get()));
  }
  // All errors of the launches are found before the first one runs.
  MARLIN_ASSIGN_OR_RETURN(const std::vector<BoundLaunch> bound, Bind(launches, *caller));
  MARLIN_ASSIGN_OR_RETURN(NS::SharedPtr<MTL::CommandBuffer> commands, Encode(queue, bound));
  Submitted submitted{commands, queue, {}, caller, check, {}};
  for (const KernelLaunch& launch : launches) {
    submitted.what += fmt::format("{}{}", submitted.what.empty() ? "" : ", ", launch.function);
    if (launch.reached != nullptr) submitted.reached.push_back(launch.reached);
  }
  commands->commit();
  work_.Add(std::move(submitted));
  if (!caller->copied()) return Status();
  commands->waitUntilCompleted();
  MARLIN_RETURN_IF_ERROR(work_.Check());
  caller->CopyBack();
  return Status();
}

}  // namespace

Result<std::unique_ptr<Driver>> OpenAppleDriver(const AppleDriverOptions& options) {
  const AutoreleaseScope scope;
  NS::SharedPtr<MTL::Device> device = FindDevice();
  if (device.get() == nullptr) {
    return Status(Code::kUnsupported, "metal: Metal finds no GPU on this machine");
  }
  const auto wanted = ReadEnvironment("METAL_MARLIN_METAL_SELF_TEST");
  const bool self_test = !wanted || wanted->value != "0";
  auto driver = std::make_unique<AppleDriver>(std::move(device));
  MARLIN_RETURN_IF_ERROR(driver->Start(self_test && !options.for_list));
  if (options.for_list) driver->TakeAsTested();
  return std::unique_ptr<Driver>(std::move(driver));
}

}  // namespace marlin::metal
