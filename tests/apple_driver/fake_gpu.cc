#include "fake_gpu.h"

#include <dispatch/dispatch.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "backends/metal/apple/built_library.h"
#include "backends/metal/kernels/expert_parameters.h"
#include "backends/metal/kernels/parameters.h"
#include "backends/metal/kernels/router_parameters.h"
#include "backends/metal/plan/kernel_text.h"
#include "metal_sim/launch.h"
#include "metal_sim/metal_program.h"
#include "objective_c.h"

namespace marlin::fake_gpu {
namespace {

namespace fs = std::filesystem;
using fake_objc::Answer;
using fake_objc::Error;
using fake_objc::Fail;
using fake_objc::Object;
using fake_objc::Reference;
using fake_objc::Text;
using metal_sim::MetalProgram;

constexpr uint64_t kPage = 4096;
constexpr size_t kMostBytesInline = 4096;
constexpr size_t kBufferSlots = 31;
constexpr int64_t kInternalError = 1;  // MTLCommandBufferErrorInternal

template <typename T>
T* Autoreleased(T* object) {
  object->Autorelease();
  return object;
}

/// Returns an error as Metal's methods do: autoreleased, if the caller passed a pointer.
void SetError(Object** error, int64_t code, const std::string& text) {
  if (error != nullptr) *error = Autoreleased(new Error(code, text));
}

// --- programs -----------------------------------------------------------------------------------

/// A compiled source. Its function constants are variables, so launches are serialized.
struct Program {
  std::mutex mutex;
  std::unique_ptr<MetalProgram> program;
};

/// Compiles a text once for all tests, since it takes seconds. Returns null and sets `message` on
/// failure.
std::shared_ptr<Program> ProgramOf(const std::string& text, std::string* message) {
  static std::mutex mutex;
  static auto* programs = new std::map<std::string, std::shared_ptr<Program>>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = programs->find(text); found != programs->end()) return found->second;
  std::string folder = (fs::temp_directory_path() / "marlin-fake-metal-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) Fail(folder + ": cannot be made");
  const fs::path path = fs::path(folder) / "source.metal";
  std::ofstream(path) << text;
  auto compiled = MetalProgram::Compile(path, {});
  fs::remove_all(folder);
  if (!compiled.ok()) {
    *message = compiled.status().message();
    return nullptr;
  }
  auto program = std::make_shared<Program>();
  program->program = std::move(*compiled);
  programs->emplace(text, program);
  return program;
}

// --- objects ------------------------------------------------------------------------------------

class Device : public Object {
 public:
  Device() : Object("MTLDevice") {}
};

class Buffer : public Object {
 public:
  Buffer(void* pages, uint64_t bytes) : Object("MTLBuffer"), data(pages), length(bytes) {}
  static Buffer* Make(uint64_t bytes) {
    const uint64_t size = (bytes + kPage - 1) / kPage * kPage;
    void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
    auto* buffer = new Buffer(pages, bytes);
    buffer->mapped_bytes = size;
    return buffer;
  }
  void* data;
  uint64_t length;
  uint64_t mapped_bytes = 0;  ///< 0: host memory.

 protected:
  void Dispose() override {
    if (mapped_bytes > 0) munmap(data, mapped_bytes);
  }
};

class CompileOptions : public Object {
 public:
  CompileOptions() : Object("MTLCompileOptions") {}
  uint64_t language = 0;
  bool fast_math = true;  ///< Metal's default.
};

class Constants : public Object {
 public:
  Constants() : Object("MTLFunctionConstantValues") {}
  std::map<int, int32_t> values;
};

class Library : public Object {
 public:
  Library() : Object("MTLLibrary") {}
  std::vector<std::shared_ptr<Program>> programs;
};

class Function : public Object {
 public:
  Function() : Object("MTLFunction") {}
  std::shared_ptr<Program> program;
  std::string name;
  std::map<int, int32_t> constants;
};

class Pipeline : public Object {
 public:
  explicit Pipeline(Function* compiled) : Object("MTLComputePipelineState"), function(compiled) {}
  Reference<Function> function;

 protected:
  void Dispose() override { function = {}; }
};

class ResidencySet : public Object {
 public:
  ResidencySet() : Object("MTLResidencySet") {}
  std::map<Buffer*, Reference<Buffer>> added;

 protected:
  void Dispose() override { added.clear(); }
};

class Array : public Object {
 public:
  Array() : Object("NSArray") {}
  std::vector<Reference<Object>> objects;

 protected:
  void Dispose() override { objects.clear(); }
};

struct Size {
  uint64_t x, y, z;
};

struct Binding {
  Reference<Buffer> buffer;
  uint64_t offset = 0;
};

struct Dispatch {
  Reference<Pipeline> pipeline;
  std::vector<Reference<Buffer>> used;  ///< Not bound, but resident: useResources.
  std::map<int, Binding> buffers;
  std::map<int, std::vector<uint8_t>> values;
  Size groups;
  Size threads;
};

enum Status : uint64_t { kNotEnqueued = 0, kCommitted = 2, kCompleted = 4, kFailed = 5 };

class CommandBuffer;

class Queue : public Object {
 public:
  explicit Queue(Object* its_device) : Object("MTLCommandQueue"), device(its_device) {}
  /// Runs committed command buffers up to and including `last`.
  void RunUntil(const CommandBuffer* last);

  Object* device;
  std::mutex mutex;
  std::deque<Reference<CommandBuffer>> committed;
  Reference<ResidencySet> resident;

 protected:
  void Dispose() override { resident = {}; }
};

class CommandBuffer : public Object {
 public:
  explicit CommandBuffer(Queue* its_queue) : Object("MTLCommandBuffer"), queue(its_queue) {}
  void Run();

  Reference<Queue> queue;
  std::vector<Dispatch> dispatches;
  bool encoding = false;
  int64_t number = -1;  ///< Index in the order of commits.
  std::atomic<uint64_t> status{kNotEnqueued};
  Reference<Error> error;

 protected:
  void Dispose() override {
    dispatches.clear();
    error = {};
    queue = {};
  }
};

class Encoder : public Object {
 public:
  explicit Encoder(CommandBuffer* encoded)
      : Object("MTLComputeCommandEncoder"), commands(encoded) {}
  Reference<CommandBuffer> commands;
  Dispatch state;
  bool ended = false;

 protected:
  void Dispose() override {
    if (!ended) Fail("an encoder is released before endEncoding");
    state = {};
    commands = {};
  }
};

// --- running ------------------------------------------------------------------------------------

/// Metal knows a buffer's length, not the range that a kernel may access: assumes that it ends at
/// the next bound offset.
int64_t BytesOf(const Dispatch& dispatch, const Binding& binding) {
  uint64_t end = binding.buffer->length;
  for (const auto& [index, other] : dispatch.buffers) {
    if (other.buffer.get() == binding.buffer.get() && other.offset > binding.offset) {
      end = std::min(end, other.offset);
    }
  }
  return static_cast<int64_t>(end - binding.offset);
}

metal_sim::ConstantValues ConstantsOf(const Function& function, const metal_sim::Module& module) {
  metal_sim::ConstantValues values;
  for (int i = 0; i < module.constant_count; ++i) {
    const auto found = function.constants.find(module.constants[i].index);
    if (found == function.constants.end()) continue;
    std::vector<uint8_t>& bytes = values[found->first];
    bytes.resize(sizeof(found->second));
    std::memcpy(bytes.data(), &found->second, sizeof(found->second));
  }
  return values;
}

/// Most kernels write only the output, and absent operands are bound to the weights. Those of the
/// sort by experts have no absent operands and write several arrays; routers write ids, weights and
/// an error, and the first kernel of experts that are not sorted an error.
bool Writes(const std::string& function, int index) {
  constexpr std::array<const char*, 4> kSorts = {"moe_sort_experts", "moe_rank_selections",
                                                 "moe_scan_experts", "moe_scatter_selections"};
  if (std::find(kSorts.begin(), kSorts.end(), function) != kSorts.end()) return true;
  constexpr std::array<const char*, 4> kUnsorted = {"moe_gate_up_1", "moe_expert_gemm_fp4",
                                                    "moe_shared_expert", "moe_shared_score"};
  const bool chooses = std::find(kUnsorted.begin(), kUnsorted.end(), function) != kUnsorted.end();
  const bool routes = function.starts_with("moe_router_");
  return index == MARLIN_BUFFER_OUTPUT || (chooses && index == MARLIN_BUFFER_WRONG_ID) ||
         (routes && (index == MARLIN_BUFFER_ROUTER_WEIGHTS || index == MARLIN_BUFFER_ROUTER_ERROR));
}
static_assert(MARLIN_BUFFER_ROUTER_IDS == MARLIN_BUFFER_OUTPUT);

/// Corrupts results as a different GPU might.
void Disturb(const Dispatch& dispatch) {
  const auto found = dispatch.buffers.find(MARLIN_BUFFER_OUTPUT);
  if (found == dispatch.buffers.end()) return;
  const Binding& out = found->second;
  auto* numbers = reinterpret_cast<float*>(static_cast<std::byte*>(out.buffer->data) + out.offset);
  if (dispatch.pipeline->function->name != "marlin_self_test") {
    const bool breaks = dispatch.pipeline->function->name == TheBehaviour().breaks;
    if (TheBehaviour().breaks_sums || breaks) numbers[0] += 1;
    return;
  }
  if (TheBehaviour().rotates_fragments) std::rotate(numbers, numbers + 2, numbers + 64);
  if (TheBehaviour().breaks_products) numbers[128 + 9] += 1;
}

/// Returns empty, or an error message.
std::string RunDispatch(const Dispatch& dispatch) {
  const Function& function = *dispatch.pipeline->function.get();
  const std::lock_guard<std::mutex> lock(function.program->mutex);
  MetalProgram& program = *function.program->program;
  const auto kernel = program.Find(function.name);
  if (!kernel.ok()) return kernel.status().message();
  const metal_sim::Status set = program.SetConstants(ConstantsOf(function, program.module()));
  if (!set.ok()) return set.message();
  const auto narrow = [](const Size& size) {
    return metal_sim::Size3{static_cast<uint32_t>(size.x), static_cast<uint32_t>(size.y),
                            static_cast<uint32_t>(size.z)};
  };
  metal_sim::Launch launch;
  launch.grid = narrow(dispatch.groups);
  launch.threads_per_threadgroup = narrow(dispatch.threads);
  launch.program_ranges = program.ranges();
  launch.values = dispatch.values;
  for (const auto& [index, binding] : dispatch.buffers) {
    metal_sim::BufferBinding bound;
    bound.data = static_cast<std::byte*>(binding.buffer->data) + binding.offset;
    bound.bytes = BytesOf(dispatch, binding);
    bound.read_only = !Writes(function.name, index);
    launch.buffers[index] = bound;
  }
  for (const Reference<Buffer>& buffer : dispatch.used) {
    const auto* data = static_cast<const std::byte*>(buffer->data);
    launch.reached_ranges.emplace_back(data, data + buffer->length);
  }
  const auto report = metal_sim::Simulate(**kernel, launch, {});
  if (!report.ok()) return report.status().message();
  ++TheLog().dispatches;
  Disturb(dispatch);
  return report->clean() ? "" : report->findings.front().text;
}

void CommandBuffer::Run() {
  if (TheBehaviour().on_run) TheBehaviour().on_run();
  std::string wrong;
  const int64_t from = TheBehaviour().fails_from;
  if (from >= 0 && number >= from)
    wrong = fmt::format("Caused GPU Timeout Error {}", number - from);
  for (const Dispatch& dispatch : dispatches) {
    if (wrong.empty()) wrong = RunDispatch(dispatch);
  }
  dispatches.clear();  // Releases the objects that they keep alive.
  if (!wrong.empty()) {
    auto* made = new Error(kInternalError, wrong);
    error = Reference<Error>(made);
    made->Release();
  }
  status = wrong.empty() ? kCompleted : kFailed;
}

void Queue::RunUntil(const CommandBuffer* last) {
  const std::lock_guard<std::mutex> lock(mutex);
  while (last->status == kCommitted) {
    if (committed.empty()) Fail("a command buffer is waited for that its queue does not have");
    const Reference<CommandBuffer> first = committed.front();
    committed.pop_front();
    first->Run();
  }
}

// --- methods ------------------------------------------------------------------------------------

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
  Answer("MTLDevice", "newComputePipelineStateWithFunction:error:",
         [](Object*, SEL, Function* function, Object**) -> Object* {
           ++TheLog().pipelines;
           return new Pipeline(function);
         });
  Answer("MTLDevice", "newResidencySetWithDescriptor:error:",
         [](Object*, SEL, Object*, Object**) -> Object* { return new ResidencySet; });
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
  Answer("MTLResidencySet", "commit", [](Object*, SEL) {});
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
  Answer("MTLCommandQueue", "commandBuffer",
         [](Queue* self, SEL) -> Object* { return Autoreleased(new CommandBuffer(self)); });
  Answer("MTLCommandBuffer", "computeCommandEncoderWithDispatchType:",
         [](CommandBuffer* self, SEL, uint64_t type) -> Object* {
           if (type != 0) Fail("expected serial dispatches");
           if (self->encoding || self->status != kNotEnqueued) Fail("a second encoder");
           self->encoding = true;
           return Autoreleased(new Encoder(self));
         });
  Answer("MTLCommandBuffer", "commit", [](CommandBuffer* self, SEL) {
    if (self->encoding) Fail("commit before endEncoding");
    if (self->status != kNotEnqueued) Fail("committed twice");
    const std::lock_guard<std::mutex> lock(self->queue->mutex);
    self->number = TheLog().command_buffers++;
    self->status = kCommitted;
    self->queue->committed.emplace_back(self);
  });
  Answer("MTLCommandBuffer", "waitUntilCompleted", [](CommandBuffer* self, SEL) {
    if (self->status == kNotEnqueued) Fail("waits for what is not committed");
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
           if (usage != kRead) Fail("expected resources that are read");
           for (uint64_t i = 0; i < count; ++i) self->state.used.emplace_back(buffers[i]);
         });
  Answer("MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:",
         [](Encoder* self, SEL, Size groups, Size threads) {
           if (self->state.pipeline.get() == nullptr) Fail("dispatches without a pipeline");
           if (groups.x * groups.y * groups.z == 0) Fail("dispatches nothing");
           if (threads.x * threads.y * threads.z > TheBehaviour().most_threads) {
             Fail("more threads than the pipeline takes");
           }
           self->state.groups = groups;
           self->state.threads = threads;
           self->commands->dispatches.push_back(self->state);
         });
  Answer("MTLComputeCommandEncoder", "endEncoding", [](Encoder* self, SEL) {
    self->ended = true;
    self->commands->encoding = false;
  });
}

Device* PreparedDevice() {
  static const bool added =
      (AddDevice(), AddCompiling(), AddMemory(), AddCommands(), AddEncoder(), true);
  (void)added;
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
