// The objects of the fake GPU (fake_gpu.cc).
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/runtime/driver.h"
#include "metal_sim/metal_program.h"
#include "objective_c.h"

namespace marlin::fake_gpu {

using fake_objc::Error;
using fake_objc::Fail;
using fake_objc::Object;
using fake_objc::Reference;
using metal_sim::MetalProgram;

inline constexpr uint64_t kPage = 4096;

/// A compiled source. Its function constants are variables, so launches are serialized.
struct Program {
  std::mutex mutex;
  std::unique_ptr<MetalProgram> program;
};

/// Compiles a text once for all tests, since it takes seconds. Returns null and sets `message` on
/// failure.
std::shared_ptr<Program> ProgramOf(const std::string& text, std::string* message);

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

class Archive : public Object {
 public:
  Archive() : Object("MTLBinaryArchive") {}
  std::set<std::string> keys;  ///< One for each function with its constants.
};

class ArchiveDescriptor : public Object {
 public:
  ArchiveDescriptor() : Object("MTLBinaryArchiveDescriptor") {}
  std::string path;
};

class PipelineDescriptor : public Object {
 public:
  PipelineDescriptor() : Object("MTLComputePipelineDescriptor") {}
  Reference<Function> function;
  Reference<Archive> archive;

 protected:
  void Dispose() override {
    function = {};
    archive = {};
  }
};

class ResidencySet : public Object {
 public:
  ResidencySet() : Object("MTLResidencySet") {}
  std::map<Buffer*, Reference<Buffer>> added;
  std::map<Buffer*, Reference<Buffer>> committed;

 protected:
  void Dispose() override {
    added.clear();
    committed.clear();
  }
};

class Fence : public Object {
 public:
  Fence() : Object("MTLFence") {}
};

class CommandBufferDescriptor : public Object {
 public:
  CommandBufferDescriptor() : Object("MTLCommandBufferDescriptor") {}
  uint64_t error_options = 0;
};

class EncoderInfo : public Object {
 public:
  explicit EncoderInfo(std::string its_label)
      : Object("MTLCommandBufferEncoderInfo"), label(std::move(its_label)) {}
  std::string label;
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
  int64_t bytes = 0;  ///< From here on: as the launch declares it.
  bool written = false;
  bool initialised = true;
};

/// Bytes that a dispatch uses, as the driver declares them.
struct Range {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  bool written = false;

  bool Conflicts(const Range& other) const {
    return (written || other.written) && begin < other.end && other.begin < end;
  }
};

struct Dispatch {
  Reference<Pipeline> pipeline;
  std::shared_ptr<const metal::KernelLaunch> declared;
  int64_t barriers = 0;  ///< In the encoder, before it.
  std::vector<Range> ranges;
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
  Reference<Fence> fence;  ///< Which its last encoder updated.

 protected:
  void Dispose() override {
    resident = {};
    fence = {};
  }
};

class CommandBuffer : public Object {
 public:
  explicit CommandBuffer(Queue* its_queue) : Object("MTLCommandBuffer"), queue(its_queue) {}
  void Run();

  /// The buffers of its residency sets when it was committed.
  void TakeResident();

  Reference<Queue> queue;
  std::vector<Dispatch> dispatches;
  std::vector<Reference<ResidencySet>> sets;
  std::map<Buffer*, Reference<Buffer>> resident;
  std::string label;  ///< The encoder's.
  bool tells_encoders = false;
  bool encoding = false;
  int64_t number = -1;  ///< Index in the order of commits.
  std::atomic<uint64_t> status{kNotEnqueued};
  Reference<Error> error;

 protected:
  void Dispose() override {
    dispatches.clear();
    sets.clear();
    resident.clear();
    error = {};
    queue = {};
  }

 private:
  std::string RunAll();
  std::string MissingBarrier(size_t first, size_t last) const;
};

class Encoder : public Object {
 public:
  explicit Encoder(CommandBuffer* encoded)
      : Object("MTLComputeCommandEncoder"), commands(encoded) {}
  Reference<CommandBuffer> commands;
  Dispatch state;
  Reference<Fence> waited;
  Reference<Fence> updated;
  bool serial = false;  ///< Each dispatch waits for the previous one.
  bool ended = false;

 protected:
  void Dispose() override {
    if (!ended) Fail("an encoder is released before endEncoding");
    state = {};
    waited = updated = {};
    commands = {};
  }
};

/// Takes over what the launch of a dispatch declares: the memory of its arguments, and what its
/// kernel finds through addresses. Arguments of earlier dispatches are dropped: Metal keeps them,
/// and knows only the length of their buffers.
void TakeDeclared(Dispatch* dispatch);

}  // namespace marlin::fake_gpu
