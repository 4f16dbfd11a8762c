#include "fake_gpu.h"

#include <dispatch/dispatch.h>
#include <fmt/format.h>
#include <stdlib.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "backends/metal/apple/built_library.h"
#include "backends/metal/apple/launch_observer.h"
#include "backends/metal/kernels/parameters.h"
#include "backends/metal/plan/kernel_text.h"
#include "fake_objects.h"

namespace marlin::fake_gpu {
namespace {

using fake_objc::Answer;
using fake_objc::Text;

constexpr size_t kMostBytesInline = 4096;
constexpr size_t kBufferSlots = 31;
constexpr uint64_t kConcurrent = 1;  // MTLDispatchTypeConcurrent
constexpr int64_t kFaulted = 4;      // MTLCommandEncoderErrorStateFaulted

template <typename T>
T* Autoreleased(T* object) {
  object->Autorelease();
  return object;
}

/// Returns an error as Metal's methods do: autoreleased, if the caller passed a pointer.
void SetError(Object** error, int64_t code, const std::string& text) {
  if (error != nullptr) *error = Autoreleased(new Error(code, text));
}

/// The launch that the driver encodes next.
thread_local std::shared_ptr<const metal::KernelLaunch> announced;

Device* TheDevice() {
  static auto* device = new Device;
  return device;
}

Object* NewLibraryOfSource(Text* source, CompileOptions* options, Object** error) {
  constexpr uint64_t kLanguage31 = 3 << 16 | 1;
  ++TheLog().sources;
  TheLog().fast_math = options->fast_math;
  if (options->language != kLanguage31) Fail("expected MSL 3.1");
  std::string message = TheBehaviour().compiler_error;
  std::shared_ptr<Program> program;
  if (message.empty()) program = ProgramOf(source->value, &message);
  if (program == nullptr) {
    SetError(error, 3, message);
    return nullptr;
  }
  if (!TheBehaviour().compiler_warning.empty()) {
    SetError(error, 4, TheBehaviour().compiler_warning);
  }
  auto* library = new Library;
  library->programs.push_back(std::move(program));
  return library;
}

/// The fake metallib contains the names of sources.
Object* NewLibraryOfData(const std::string& names, Object** error) {
  if (TheBehaviour().refuses_built_library) {
    SetError(error, 1, "the library is of another version");
    return nullptr;
  }
  auto* library = new Library;
  std::istringstream lines(names);
  for (std::string name; std::getline(lines, name);) {
    const auto text = metal::KernelText(name);
    std::string message;
    auto program = text.ok() ? ProgramOf(*text, &message) : nullptr;
    if (program == nullptr) Fail(name + ": " + message);
    library->programs.push_back(std::move(program));
  }
  return library;
}

Object* NewFunction(Library* library, Text* name, Constants* constants, Object** error) {
  for (const auto& program : library->programs) {
    if (!program->program->Find(name->value).ok()) continue;
    if (name->value == TheBehaviour().missing_function) break;
    auto* function = new Function;
    function->program = program;
    function->name = name->value;
    function->constants = constants->values;
    return function;
  }
  SetError(error, 5, "Function " + name->value + " was not found in the library");
  return nullptr;
}

Object* NewBuffer(uint64_t bytes) {
  int64_t& left = TheBehaviour().buffers_until_full;
  if (bytes > TheBehaviour().largest_buffer || left == 0) return nullptr;
  if (left > 0) --left;
  ++TheLog().buffers;
  return Buffer::Make(bytes);
}

/// A function with its constants, as a line.
std::string KeyOf(const Function& function) {
  std::string key = function.name;
  for (const auto& [index, value] : function.constants) key += fmt::format(" {}={}", index, value);
  return key;
}

constexpr const char* kArchiveTitle = "archive of the fake GPU";

Object* NewArchive(const ArchiveDescriptor& descriptor, Object** error) {
  if (descriptor.path.empty()) return new Archive;
  std::ifstream file(descriptor.path);
  std::string line;
  if (!std::getline(file, line) || line != kArchiveTitle) {
    SetError(error, 1, "not an archive");
    return nullptr;
  }
  auto* archive = new Archive;
  while (std::getline(file, line)) archive->keys.insert(line);
  return archive;
}

Object* NewPipeline(PipelineDescriptor* descriptor, uint64_t options, Object** error) {
  constexpr uint64_t kFailOnMiss = 4;
  static std::mutex mutex;  // Guards the archive and the counts.
  const std::lock_guard<std::mutex> lock(mutex);
  const Archive* const archive = descriptor->archive.get();
  const bool found =
      archive != nullptr && archive->keys.contains(KeyOf(*descriptor->function.get()));
  if (!found && (options & kFailOnMiss) != 0) {
    SetError(error, 1, "not in the archive");
    return nullptr;
  }
  ++(found ? TheLog().found_pipelines : TheLog().pipelines);
  return new Pipeline(descriptor->function.get());
}

void AddDevice() {
  Answer("MTLDevice", "respondsToSelector:", [](Object* self, SEL, SEL selector) {
    const bool newer = std::strcmp(reinterpret_cast<const char*>(selector),
                                   "newResidencySetWithDescriptor:error:") == 0;
    return newer ? TheBehaviour().residency_sets : fake_objc::HasMethod(*self, selector);
  });
  Answer("MTLDevice", "name",
         [](Object*, SEL) -> Object* { return Autoreleased(new Text(TheBehaviour().name)); });
  Answer("MTLDevice", "supportsFamily:", [](Object*, SEL, int64_t family) {
    return family > 1000 && family <= 1000 + TheBehaviour().family;
  });
  Answer("MTLDevice", "registryID", [](Object*, SEL) { return uint64_t{17}; });
  Answer("MTLDevice", "recommendedMaxWorkingSetSize",
         [](Object*, SEL) { return uint64_t{1} << 30; });
  Answer("MTLDevice", "maxThreadgroupMemoryLength", [](Object*, SEL) { return uint64_t{32768}; });
  Answer("MTLDevice", "maxBufferLength",
         [](Object*, SEL) { return TheBehaviour().largest_buffer; });
  Answer("MTLDevice", "newFence", [](Object*, SEL) -> Object* { return new Fence; });
  Answer("MTLDevice", "newCommandQueue",
         [](Object* self, SEL) -> Object* { return new Queue(self); });
  Answer("MTLDevice", "newBufferWithLength:options:", [](Object*, SEL, uint64_t bytes, uint64_t) {
    return NewBuffer(bytes);
  });
  Answer("MTLDevice", "newBufferWithBytesNoCopy:length:options:deallocator:",
         [](Object*, SEL, void* pages, uint64_t bytes, uint64_t, void*) -> Object* {
           if (reinterpret_cast<uintptr_t>(pages) % kPage != 0 || bytes % kPage != 0) {
             Fail("newBufferWithBytesNoCopy: not whole pages");
           }
           if (!TheBehaviour().maps_pages) return nullptr;
           ++TheLog().mapped;
           return new Buffer(pages, bytes);
         });
  Answer("MTLDevice", "newLibraryWithSource:options:error:",
         [](Object*, SEL, Text* source, CompileOptions* options, Object** error) {
           return NewLibraryOfSource(source, options, error);
         });
  Answer("MTLDevice",
         "newLibraryWithData:error:", [](Object*, SEL, const std::string* data, Object** error) {
           return NewLibraryOfData(*data, error);
         });
  Answer("MTLDevice", "newComputePipelineStateWithDescriptor:options:reflection:error:",
         [](Object*, SEL, PipelineDescriptor* descriptor, uint64_t options, void*, Object** error) {
           return NewPipeline(descriptor, options, error);
         });
  Answer(
      "MTLDevice", "newComputePipelineStateWithFunction:error:",
      [](Object*, SEL, Function* function, Object**) -> Object* { return new Pipeline(function); });
  Answer("MTLDevice", "newResidencySetWithDescriptor:error:",
         [](Object*, SEL, Object*, Object**) -> Object* { return new ResidencySet; });
}

void AddArchives() {
  Answer("class MTLComputePipelineDescriptor", "alloc",
         [](Object*, SEL) -> Object* { return new PipelineDescriptor; });
  Answer("MTLComputePipelineDescriptor",
         "setComputeFunction:", [](PipelineDescriptor* self, SEL, Function* function) {
           self->function = Reference<Function>(function);
         });
  Answer("MTLComputePipelineDescriptor",
         "setBinaryArchives:", [](PipelineDescriptor* self, SEL, Array* archives) {
           auto* archive = static_cast<Archive*>(archives->objects.at(0).get());
           self->archive = Reference<Archive>(archive);
         });
  Answer("class MTLBinaryArchiveDescriptor", "alloc",
         [](Object*, SEL) -> Object* { return new ArchiveDescriptor; });
  Answer("MTLBinaryArchiveDescriptor",
         "setUrl:", [](ArchiveDescriptor* self, SEL, Text* url) { self->path = url->value; });
  Answer("MTLDevice", "newBinaryArchiveWithDescriptor:error:",
         [](Object*, SEL, ArchiveDescriptor* descriptor, Object** error) {
           return NewArchive(*descriptor, error);
         });
  Answer("MTLBinaryArchive", "addComputePipelineFunctionsWithDescriptor:error:",
         [](Archive* self, SEL, PipelineDescriptor* descriptor, Object**) {
           self->keys.insert(KeyOf(*descriptor->function.get()));
           return true;
         });
  Answer("MTLBinaryArchive", "serializeToURL:error:", [](Archive* self, SEL, Text* url, Object**) {
    std::ofstream file(url->value);
    file << kArchiveTitle << "\n";
    for (const std::string& key : self->keys) file << key << "\n";
    return file.good();
  });
  Answer("class NSURL", "fileURLWithPath:", [](Object*, SEL, Text* path) { return path; });
  Answer("class NSArray", "arrayWithObject:", [](Object*, SEL, Object* object) -> Object* {
    auto* array = new Array;
    array->objects.emplace_back(object);
    return Autoreleased(array);
  });
}

void AddCompiling() {
  Answer("class MTLCompileOptions", "alloc",
         [](Object*, SEL) -> Object* { return new CompileOptions; });
  Answer("MTLCompileOptions", "respondsToSelector:", [](Object*, SEL, SEL) {
    return TheBehaviour().math_modes;
  });  // The only property that is read.
  Answer("MTLCompileOptions", "setLanguageVersion:",
         [](CompileOptions* self, SEL, uint64_t version) { self->language = version; });
  Answer("MTLCompileOptions", "setMathMode:", [](CompileOptions* self, SEL, int64_t mode) {
    if (!TheBehaviour().math_modes) Fail("setMathMode: before macOS 15");
    self->fast_math = mode != 0;
  });
  Answer("MTLCompileOptions", "setFastMathEnabled:", [](CompileOptions* self, SEL, bool enabled) {
    self->fast_math = enabled;
  });
  Answer("class MTLFunctionConstantValues", "alloc",
         [](Object*, SEL) -> Object* { return new Constants; });
  Answer("MTLFunctionConstantValues", "setConstantValue:type:atIndex:",
         [](Constants* self, SEL, const int32_t* value, uint64_t type, uint64_t index) {
           constexpr uint64_t kInt = 29;
           if (type != kInt) Fail("a function constant that is no int");
           self->values[static_cast<int>(index)] = *value;
         });
  Answer("MTLLibrary", "newFunctionWithName:constantValues:error:",
         [](Library* self, SEL, Text* name, Constants* constants, Object** error) {
           return NewFunction(self, name, constants, error);
         });
  Answer("MTLComputePipelineState", "threadExecutionWidth",
         [](Object*, SEL) { return TheBehaviour().simdgroup_threads; });
  Answer("MTLComputePipelineState", "maxTotalThreadsPerThreadgroup",
         [](Object*, SEL) { return TheBehaviour().most_threads; });
}

void AddMemory() {
  Answer("MTLBuffer", "contents", [](Buffer* self, SEL) { return self->data; });
  Answer("MTLBuffer", "gpuAddress",
         [](Buffer* self, SEL) { return reinterpret_cast<uint64_t>(self->data); });
  Answer("MTLBuffer", "length", [](Buffer* self, SEL) { return self->length; });
  Answer("class MTLResidencySetDescriptor", "alloc",
         [](Object*, SEL) -> Object* { return new Object("MTLResidencySetDescriptor"); });
  Answer("MTLResidencySet", "addAllocation:", [](ResidencySet* self, SEL, Buffer* buffer) {
    self->added.emplace(buffer, Reference<Buffer>(buffer));
    ++TheLog().resident;
  });
  Answer("MTLResidencySet", "removeAllocation:", [](ResidencySet* self, SEL, Buffer* buffer) {
    self->added.erase(buffer);
    --TheLog().resident;
  });
  Answer("MTLResidencySet", "containsAllocation:", [](ResidencySet* self, SEL, Buffer* buffer) {
    return self->added.contains(buffer);
  });
  Answer("MTLResidencySet", "allocatedSize", [](ResidencySet* self, SEL) {
    uint64_t bytes = 0;
    for (const auto& [buffer, reference] : self->added) bytes += buffer->length;
    return bytes;
  });
  Answer("MTLResidencySet", "commit", [](ResidencySet* self, SEL) {
    self->committed = self->added;
    ++TheLog().residency_commits;
  });
  Answer("MTLResidencySet", "requestResidency", [](Object*, SEL) {});
  Answer("NSArray", "count", [](Array* self, SEL) { return uint64_t{self->objects.size()}; });
  Answer("NSArray", "objectAtIndex:", [](Array* self, SEL, uint64_t index) {
    return self->objects.at(index).get();
  });
}

void AddCommands() {
  Answer("MTLCommandQueue", "device", [](Queue* self, SEL) { return self->device; });
  Answer("MTLCommandQueue", "addResidencySet:", [](Queue* self, SEL, ResidencySet* set) {
    self->resident = Reference<ResidencySet>(set);
  });
  Answer("class MTLCommandBufferDescriptor", "alloc",
         [](Object*, SEL) -> Object* { return new CommandBufferDescriptor; });
  Answer("MTLCommandBufferDescriptor",
         "setErrorOptions:", [](CommandBufferDescriptor* self, SEL, uint64_t options) {
           self->error_options = options;
         });
  Answer("MTLCommandQueue", "commandBuffer",
         [](Queue* self, SEL) -> Object* { return Autoreleased(new CommandBuffer(self)); });
  Answer("MTLCommandQueue", "commandBufferWithDescriptor:",
         [](Queue* self, SEL, CommandBufferDescriptor* descriptor) -> Object* {
           auto* commands = new CommandBuffer(self);
           commands->tells_encoders = descriptor->error_options != 0;
           return Autoreleased(commands);
         });
  Answer("MTLCommandBuffer", "useResidencySet:", [](CommandBuffer* self, SEL, ResidencySet* set) {
    self->sets.emplace_back(set);
  });
  Answer("MTLCommandBuffer", "computeCommandEncoderWithDispatchType:",
         [](CommandBuffer* self, SEL, uint64_t type) -> Object* {
           const bool serial = type != kConcurrent;
           if (serial && !TheBehaviour().takes_serial) Fail("expected concurrent dispatches");
           if (self->encoding || self->status != kNotEnqueued) Fail("a second encoder");
           self->encoding = true;
           auto* encoder = new Encoder(self);
           encoder->serial = serial;
           return Autoreleased(encoder);
         });
  Answer("MTLCommandBuffer", "commit", [](CommandBuffer* self, SEL) {
    if (self->encoding) Fail("commit before endEncoding");
    if (self->status != kNotEnqueued) Fail("committed twice");
    const std::lock_guard<std::mutex> lock(self->queue->mutex);
    self->TakeResident();
    self->number = TheLog().command_buffers++;
    self->status = kCommitted;
    self->queue->committed.emplace_back(self);
  });
  Answer("MTLCommandBuffer", "waitUntilCompleted", [](CommandBuffer* self, SEL) {
    if (self->status == kNotEnqueued) Fail("waits for what is not committed");
    if (self->status == kCommitted) ++TheLog().waits;
    self->queue->RunUntil(self);
  });
  Answer("MTLCommandBuffer", "status",
         [](CommandBuffer* self, SEL) { return self->status.load(); });
  Answer("MTLCommandBuffer", "error", [](CommandBuffer* self, SEL) { return self->error.get(); });
}

void AddEncoder() {
  Answer("MTLComputeCommandEncoder",
         "setComputePipelineState:", [](Encoder* self, SEL, Pipeline* pipeline) {
           self->state.pipeline = Reference<Pipeline>(pipeline);
         });
  Answer("MTLComputeCommandEncoder", "setBuffer:offset:atIndex:",
         [](Encoder* self, SEL, Buffer* buffer, uint64_t offset, uint64_t index) {
           if (buffer == nullptr || offset >= buffer->length || index >= kBufferSlots) {
             Fail(fmt::format("setBuffer: index {}, offset {}", index, offset));
           }
           if (index == MARLIN_BUFFER_INPUT) TheLog().input_offset = offset;
           self->state.values.erase(static_cast<int>(index));
           self->state.buffers[static_cast<int>(index)] = {Reference<Buffer>(buffer), offset};
         });
  Answer("MTLComputeCommandEncoder", "setBytes:length:atIndex:",
         [](Encoder* self, SEL, const uint8_t* bytes, uint64_t length, uint64_t index) {
           if (length > kMostBytesInline || index >= kBufferSlots) Fail("setBytes: too long");
           self->state.buffers.erase(static_cast<int>(index));
           self->state.values[static_cast<int>(index)].assign(bytes, bytes + length);
         });
  Answer("MTLComputeCommandEncoder", "useResources:count:usage:",
         [](Encoder* self, SEL, Buffer* const* buffers, uint64_t count, uint64_t usage) {
           constexpr uint64_t kRead = 1;
           if ((usage & kRead) == 0) Fail("expected resources that are read");
           TheLog().used_resources += static_cast<int64_t>(count);
           for (uint64_t i = 0; i < count; ++i) self->state.used.emplace_back(buffers[i]);
         });
  Answer("MTLComputeCommandEncoder",
         "memoryBarrierWithScope:", [](Encoder* self, SEL, uint64_t scope) {
           constexpr uint64_t kBuffers = 1;
           if (scope != kBuffers) Fail("expected a barrier of buffers");
           if (TheLog().barriers++ != TheBehaviour().drops_barrier) ++self->state.barriers;
         });
  Answer("MTLComputeCommandEncoder", "waitForFence:", [](Encoder* self, SEL, Fence* fence) {
    if (self->updated.get() == fence) Fail("waits for a fence after it has updated it");
    self->waited = Reference<Fence>(fence);
  });
  Answer("MTLComputeCommandEncoder", "updateFence:", [](Encoder* self, SEL, Fence* fence) {
    self->updated = Reference<Fence>(fence);
  });
  Answer("MTLComputeCommandEncoder", "setLabel:", [](Encoder* self, SEL, Text* label) {
    self->commands->label = label->value;
  });
  Answer("MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:",
         [](Encoder* self, SEL, Size groups, Size threads) {
           if (self->state.pipeline.get() == nullptr) Fail("dispatches without a pipeline");
           if (groups.x * groups.y * groups.z == 0) Fail("dispatches nothing");
           if (threads.x * threads.y * threads.z > TheBehaviour().most_threads) {
             Fail("more threads than the pipeline takes");
           }
           if (announced == nullptr) Fail("dispatches what nobody announced");
           if (self->serial) ++self->state.barriers;
           self->state.groups = groups;
           self->state.threads = threads;
           Dispatch& dispatch = self->commands->dispatches.emplace_back(self->state);
           dispatch.declared = std::move(announced);
           announced = nullptr;
           TakeDeclared(&dispatch);
         });
  Answer("MTLComputeCommandEncoder", "endEncoding", [](Encoder* self, SEL) {
    Queue& queue = *self->commands->queue.get();
    // Memory behind addresses is not ordered by Metal.
    if (queue.fence.get() != nullptr && queue.fence.get() != self->waited.get()) {
      Fail("an encoder does not wait for the fence of the one before it");
    }
    queue.fence = self->updated;
    self->ended = true;
    self->commands->encoding = false;
  });
}

void AddErrors() {
  Answer("NSObject", "setLabel:", [](Object*, SEL, Object*) {});
  Answer("NSError", "userInfo", [](Error* self, SEL) -> Object* {
    auto* encoders = new Array;
    if (!self->blamed.empty()) {
      auto* info = new EncoderInfo(self->blamed);
      encoders->objects.emplace_back(info);
      info->Release();
    }
    return Autoreleased(encoders);
  });
  // Stands for the dictionary, which has nothing else.
  Answer("NSArray", "objectForKey:", [](Array* self, SEL, Object*) { return self; });
  Answer("MTLCommandBufferEncoderInfo", "label",
         [](EncoderInfo* self, SEL) -> Object* { return Autoreleased(new Text(self->label)); });
  Answer("MTLCommandBufferEncoderInfo", "errorState", [](Object*, SEL) { return kFaulted; });
}

Device* PreparedDevice() {
  static const bool added = (AddDevice(), AddArchives(), AddCompiling(), AddMemory(), AddCommands(),
                             AddEncoder(), AddErrors(), true);
  (void)added;
  metal::TheLaunchObserver() = [](const metal::KernelLaunch& launch) {
    announced = std::make_shared<metal::KernelLaunch>(launch);
  };
  return TheDevice();
}

}  // namespace

Behaviour& TheBehaviour() {
  static auto* behaviour = new Behaviour;
  return *behaviour;
}

Log& TheLog() {
  static auto* log = new Log;
  return *log;
}

void Reset() {
  TheBehaviour() = {};
  TheLog() = {};
  if (unsetenv("HOME") != 0) Fail("HOME stays");
}

void* NewQueue(bool other_device) {
  static Device* other = nullptr;
  if (other_device && other == nullptr) other = new Device;
  return new Queue(other_device ? other : PreparedDevice());
}
void ReleaseQueue(void* queue) { static_cast<Queue*>(static_cast<Object*>(queue))->Release(); }

}  // namespace marlin::fake_gpu

namespace marlin::metal {

/// Replaces the metallib that the build makes on a Mac.
std::span<const uint8_t> BuiltLibrary() {
  const std::string& names = fake_gpu::TheBehaviour().built_library;
  return {reinterpret_cast<const uint8_t*>(names.data()), names.size()};
}

}  // namespace marlin::metal

extern "C" {

marlin::fake_objc::Object* MTLCreateSystemDefaultDevice() {
  if (!marlin::fake_gpu::TheBehaviour().there) return nullptr;
  marlin::fake_objc::Object* device = marlin::fake_gpu::PreparedDevice();
  device->Retain();
  return device;
}

marlin::fake_objc::Object* MTLCopyAllDevices() {
  auto* all = new marlin::fake_gpu::Array;
  if (marlin::fake_gpu::TheBehaviour().listed) {
    all->objects.emplace_back(marlin::fake_gpu::PreparedDevice());
  }
  return all;
}
marlin::fake_objc::Object* MTLCopyAllDevicesWithObserver(void* /*observer*/, void* /*handler*/) {
  return nullptr;
}
void MTLRemoveDeviceObserver(void* /*observer*/) {}

dispatch_data_t dispatch_data_create(const void* bytes, size_t size, dispatch_queue_t /*queue*/,
                                     void* /*destructor*/) {
  return reinterpret_cast<dispatch_data_t>(new std::string(static_cast<const char*>(bytes), size));
}
void dispatch_release(dispatch_data_t data) { delete reinterpret_cast<std::string*>(data); }
}