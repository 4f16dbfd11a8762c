#include "backends/metal/apple/apple_driver.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>

#include "backends/metal/apple/bound_launch.h"
#include "backends/metal/apple/caller_memory.h"
#include "backends/metal/apple/compiled_kernels.h"
#include "backends/metal/apple/device_memory.h"
#include "backends/metal/apple/gpu_cores.h"
#include "backends/metal/apple/kernel_cache.h"
#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/apple/open_commands.h"
#include "backends/metal/apple/recorded_launches.h"
#include "backends/metal/apple/submitted_work.h"
#include "backends/metal/runtime/driver.h"
#include "backends/metal/self_test.h"
#include "base/environment.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

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

/// The version and the build of the system.
std::string SystemName() {
  const AutoreleaseScope scope;
  return TextOf(NS::ProcessInfo::processInfo()->operatingSystemVersionString());
}

/// Files of the cache: the properties that the self-test found, and that all kernels were right.
constexpr std::string_view kProbed = "self_test";
constexpr std::string_view kRightKernels = "kernels";

/// The tests of OpenAppleDriver.
struct SelfTests {
  bool probes = true;
  bool remembers = true;  ///< Takes what earlier processes have found.
};

class AppleDriver final : public Driver {
 public:
  explicit AppleDriver(NS::SharedPtr<MTL::Device> device)
      : device_(std::move(device)),
        queue_(NS::TransferPtr(device_->newCommandQueue())),
        fence_(NS::TransferPtr(device_->newFence())),
        cache_(SystemName(), TextOf(device_->name())),
        kernels_(device_, cache_),
        memory_(device_, queue_.get()),
        open_({queue_.get(), fence_.get(), memory_.resident(), work_}) {
    const AutoreleaseScope scope;
    if (queue_.get() != nullptr) queue_->setLabel(MakeText("marlin"));
  }
  AppleDriver(const AppleDriver&) = delete;
  AppleDriver& operator=(const AppleDriver&) = delete;
  ~AppleDriver() override {
    if (queue_.get() != nullptr) (void)Synchronize(nullptr);
  }

  /// Errors: as OpenAppleDriver.
  Status Start(const SelfTests& tests) {
    const AutoreleaseScope scope;
    model_ = TextOf(device_->name());
    family_ = FamilyOf(device_.get());
    if (queue_.get() == nullptr) {
      return Status(Code::kUnsupported,
                    fmt::format("metal: {}: cannot create a command queue", model_));
    }
    cores_ = CountCores(device_->registryID(), model_);
    MARLIN_ASSIGN_OR_RETURN(void* const unread,
                            memory_.Allocate(kMostKernelBuffers * kUnreadBytes));
    unread_ = static_cast<std::byte*>(unread);
    return tests.probes ? Probe(tests.remembers) : Status();
  }

  /// Only for lists: nothing has been tested.
  void TakeAsTested() { known_fragments_ = listed_ = true; }

  DriverInfo Info() const override;
  DeviceShape Shape() const override { return {cores_.cores, known_fragments_}; }
  bool kernels_known_right() const override { return cache_.Read(kRightKernels).has_value(); }
  void RememberRightKernels() override { cache_.Write(kRightKernels, "right"); }
  Status Run(std::span<const KernelLaunch> launches, void* stream) override {
    return RunAndCheck(launches, stream, nullptr);
  }
  Status RunAndCheck(std::span<const KernelLaunch> launches, void* stream,
                     const ResultCheck& check) override;
  Status Synchronize(void* stream) override;
  Status WaitFor(const MemoryRange& range, void* stream) override;
  bool calls_block() const override { return false; }
  Result<std::unique_ptr<BoundLaunches>> Bind(std::vector<CheckedLaunches> calls) override;

  Result<void*> Allocate(int64_t bytes) override {
    MARLIN_RETURN_IF_ERROR(work_.Lost());
    return memory_.Allocate(bytes);
  }
  void Free(void* data) override { memory_.Free(data); }
  uint64_t AddressOf(const void* data) const override;
  std::shared_ptr<const ReachedMemory> Reach(std::span<const MemoryRange> ranges) const override;

 private:
  /// Launches that Bind bound; the driver outlives them.
  class Recording final : public BoundLaunches {
   public:
    Recording(AppleDriver& driver, RecordedLaunches launches)
        : driver_(driver), launches_(std::move(launches)) {}
    Status Run() override { return driver_.RunRecording(launches_); }

   private:
    AppleDriver& driver_;
    const RecordedLaunches launches_;
  };

  Status Probe(bool remembers);
  Status FindCallerMemory(std::span<const KernelLaunch> launches, CallerMemory* caller) const;
  LaunchBinder BinderFor(const MTL::CommandQueue* queue) {
    return {kernels_, memory_, unread_, queue != queue_.get()};
  }
  Status RunOpen(std::span<const KernelLaunch> launches, const ResultCheck& check);
  Status RunAlone(std::span<const KernelLaunch> launches, MTL::CommandQueue* queue,
                  std::shared_ptr<CallerMemory> caller, const ResultCheck& check);
  Status RunRecording(const RecordedLaunches& recording);
  void CommitOpen();

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  NS::SharedPtr<MTL::Fence> fence_;
  KernelCache cache_;
  CompiledKernels kernels_;
  DeviceMemory memory_;
  SubmittedWork work_;
  std::mutex open_mutex_;
  OpenCommands open_;            ///< On the driver's queue.
  std::byte* unread_ = nullptr;  ///< Bound in place of absent buffers; kernels do not read it.
  std::string model_;
  int family_ = 0;
  CoreCount cores_;
  bool known_fragments_ = false;  ///< Set by the self-test.
  bool keeps_subnormals_ = false;
  bool listed_ = false;
};

/// Learns how the GPU computes, once for a build and a system. Errors: kUnsupported.
Status AppleDriver::Probe(bool remembers) {
  if (const auto known = cache_.Read(kProbed); remembers && known && known->size() == 2) {
    known_fragments_ = known->front() == '1';
    keeps_subnormals_ = known->back() == '1';
    return Status();
  }
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
  cache_.Write(kProbed, fmt::format("{:d}{:d}", known_fragments_, keeps_subnormals_));
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
      fmt::format("macOS {}", SystemName()),
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
  if (memory_.resident().set() != nullptr) info.features.emplace_back("residency set");
  return info;
}

uint64_t AppleDriver::AddressOf(const void* data) const {
  const auto place = memory_.Find(data, 1);
  return place.ok() && place->buffer != nullptr ? place->buffer->gpuAddress() + place->offset : 0;
}

std::shared_ptr<const ReachedMemory> AppleDriver::Reach(std::span<const MemoryRange> ranges) const {
  auto reached = std::make_shared<ReachedBuffers>(ranges);
  std::set<const MTL::Buffer*> known;
  for (const MemoryRange& range : ranges) {
    const auto place = memory_.Find(range.data, range.bytes);
    if (!place.ok() || place->buffer == nullptr) continue;
    reached->parts.push_back(place->part);
    if (place->part->resident() || !known.insert(place->buffer).second) continue;
    reached->outside.push_back(place->buffer);
  }
  return reached;
}

/// Collects the buffers that lie in none of this driver's allocations.
Status AppleDriver::FindCallerMemory(std::span<const KernelLaunch> launches,
                                     CallerMemory* caller) const {
  for (const KernelLaunch& launch : launches) {
    for (const KernelBuffer& buffer : launch.buffers) {
      if (buffer.data == nullptr || buffer.bytes == 0) continue;
      MARLIN_ASSIGN_OR_RETURN(const BufferPlace place, memory_.Find(buffer.data, buffer.bytes));
      if (place.buffer == nullptr) caller->Add(buffer);
    }
  }
  return Status();
}

void AppleDriver::CommitOpen() {
  const AutoreleaseScope scope;
  const std::lock_guard lock(open_mutex_);
  open_.Commit();
}

Status AppleDriver::Synchronize(void* stream) {
  const auto* const queue = static_cast<const MTL::CommandQueue*>(stream);
  if (queue == nullptr || queue == queue_.get()) CommitOpen();
  return work_.Wait(queue);
}

Status AppleDriver::WaitFor(const MemoryRange& range, void* stream) {
  const auto place = memory_.Find(range.data, std::max<int64_t>(range.bytes, 1));
  if (!place.ok() || place->part == nullptr) return Synchronize(stream);
  const auto* const queue = static_cast<const MTL::CommandQueue*>(stream);
  if (queue == nullptr || queue == queue_.get()) {
    const AutoreleaseScope scope;
    const std::lock_guard lock(open_mutex_);
    if (open_.Uses(place->part.get())) open_.Commit();
  }
  return work_.WaitFor(queue, place->part.get());
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
  auto caller = std::make_shared<CallerMemory>();
  MARLIN_RETURN_IF_ERROR(FindCallerMemory(launches, caller.get()));
  if (caller->empty() && queue == queue_.get()) return RunOpen(launches, check);
  return RunAlone(launches, queue, std::move(caller), check);
}

/// Appends launches to the open command buffer.
Status AppleDriver::RunOpen(std::span<const KernelLaunch> launches, const ResultCheck& check) {
  const auto used = std::make_shared<UsedMemory>();
  const LaunchBinder binder = BinderFor(queue_.get());
  kernels_.Warm(launches);
  // All errors of the launches are found before the first one runs.
  std::vector<BoundLaunch> bound;
  for (const KernelLaunch& launch : launches) {
    MARLIN_ASSIGN_OR_RETURN(BoundLaunch each, binder.Bind(launch, {}, used.get()));
    bound.push_back(std::move(each));
  }
  const std::lock_guard lock(open_mutex_);
  for (size_t i = 0; i < bound.size(); ++i) {
    open_.MakeRoom(bound[i].operations);
    open_.Keep(used);
    MARLIN_RETURN_IF_ERROR(open_.Append(launches[i], bound[i]));
  }
  open_.AddCheck(check);
  return Status();
}

/// Runs launches in a command buffer of their own, after what is open.
Status AppleDriver::RunAlone(std::span<const KernelLaunch> launches, MTL::CommandQueue* queue,
                             std::shared_ptr<CallerMemory> caller, const ResultCheck& check) {
  if (!caller->empty()) {
    MARLIN_RETURN_IF_ERROR(work_.WaitForConflicts(queue, *caller));
    MARLIN_RETURN_IF_ERROR(caller->Map(device_.get()));
  }
  const auto used = std::make_shared<UsedMemory>();
  const LaunchBinder binder = BinderFor(queue);
  kernels_.Warm(launches);
  std::vector<BoundLaunch> bound;
  for (const KernelLaunch& launch : launches) {
    MARLIN_ASSIGN_OR_RETURN(BoundLaunch each, binder.Bind(launch, *caller, used.get()));
    bound.push_back(std::move(each));
  }
  NS::SharedPtr<MTL::CommandBuffer> commands;
  {
    const std::lock_guard lock(open_mutex_);
    const bool is_own = queue == queue_.get();
    if (is_own) open_.Commit();
    OpenCommands alone({queue, is_own ? fence_.get() : nullptr, memory_.resident(), work_});
    for (size_t i = 0; i < bound.size(); ++i) {
      MARLIN_RETURN_IF_ERROR(alone.Append(launches[i], bound[i]));
    }
    alone.Keep(used);
    alone.SetCaller(caller);
    alone.AddCheck(check);
    commands = alone.Commit();
  }
  if (!caller->copied()) return Status();
  commands->waitUntilCompleted();
  MARLIN_RETURN_IF_ERROR(work_.Check());
  caller->CopyBack();
  return Status();
}

Result<std::unique_ptr<BoundLaunches>> AppleDriver::Bind(std::vector<CheckedLaunches> calls) {
  MARLIN_RETURN_IF_ERROR(work_.Check());
  const AutoreleaseScope scope;
  CallerMemory caller;
  for (const CheckedLaunches& call : calls) {
    MARLIN_RETURN_IF_ERROR(FindCallerMemory(call.launches, &caller));
  }
  // The caller may unmap it while a buffer still maps it.
  if (!caller.empty()) return std::unique_ptr<BoundLaunches>();
  MARLIN_ASSIGN_OR_RETURN(RecordedLaunches launches,
                          RecordedLaunches::Make(calls, BinderFor(queue_.get()), memory_));
  return {std::make_unique<Recording>(*this, std::move(launches))};
}

Status AppleDriver::RunRecording(const RecordedLaunches& recording) {
  MARLIN_RETURN_IF_ERROR(work_.Check());
  const AutoreleaseScope scope;
  const std::lock_guard lock(open_mutex_);
  return recording.AppendTo(&open_);
}

}  // namespace

Result<std::unique_ptr<Driver>> OpenAppleDriver(const AppleDriverOptions& options) {
  const AutoreleaseScope scope;
  NS::SharedPtr<MTL::Device> device = FindDevice();
  if (device.get() == nullptr) {
    return Status(Code::kUnsupported, "metal: Metal finds no GPU on this machine");
  }
  const auto wanted = ReadEnvironment("METAL_MARLIN_METAL_SELF_TEST");
  const SelfTests tests{(!wanted || wanted->value != "0") && !options.for_list,
                        !wanted || wanted->value != "all"};
  auto driver = std::make_unique<AppleDriver>(std::move(device));
  MARLIN_RETURN_IF_ERROR(driver->Start(tests));
  if (options.for_list) driver->TakeAsTested();
  return std::unique_ptr<Driver>(std::move(driver));
}

}  // namespace marlin::metal
