// How the fake GPU runs command buffers: in the simulator, with the checks of barriers.
#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "backends/metal/kernels/parameters.h"
#include "fake_gpu.h"
#include "fake_objects.h"
#include "metal_sim/launch.h"

namespace marlin::fake_gpu {

namespace fs = std::filesystem;

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

namespace {

/// The bytes of arguments that no kernel reads, and that drivers bind to anything.
constexpr int64_t kUnreadBytes = 16;

}  // namespace

void TakeDeclared(Dispatch* dispatch) {
  std::map<int, Binding> kept;
  const metal::KernelLaunch& declared = *dispatch->declared;
  for (const metal::KernelBuffer& buffer : declared.buffers) {
    const auto found = dispatch->buffers.find(buffer.index);
    if (found == dispatch->buffers.end()) Fail("a buffer of a launch is not bound");
    Binding& bound = kept[buffer.index];
    bound = found->second;
    const bool empty = buffer.data == nullptr || buffer.bytes == 0;
    bound.bytes = empty ? kUnreadBytes : buffer.bytes;
    bound.written = buffer.written;
    bound.initialised = buffer.cleared;
    if (bound.offset + static_cast<uint64_t>(bound.bytes) > bound.buffer->length) {
      Fail("a launch reaches beyond the end of its buffer");
    }
    const auto* const begin = static_cast<const std::byte*>(bound.buffer->data) + bound.offset;
    if (!empty) dispatch->ranges.push_back({begin, begin + bound.bytes, buffer.written});
  }
  if (const auto found = dispatch->buffers.find(MARLIN_BUFFER_PARAMETERS);
      found != dispatch->buffers.end()) {
    Binding& bound = kept[MARLIN_BUFFER_PARAMETERS];
    bound = found->second;
    bound.bytes = static_cast<int64_t>(metal::ParameterBytes(declared).size());
  }
  dispatch->buffers = std::move(kept);
  for (const metal::AddressedRange& range : declared.addressed) {
    const auto* const begin = static_cast<const std::byte*>(range.data);
    dispatch->ranges.push_back({begin, begin + range.bytes, range.written});
  }
}

namespace {

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
  if (TheBehaviour().breaks_addresses) numbers[195] = 0;
  if (TheBehaviour().breaks_shuffles) numbers[196 + 31] += 1;
}

/// Adds what the launch declares to reach through addresses. False: it is not resident.
bool AddAddressed(const Dispatch& dispatch, const std::map<Buffer*, Reference<Buffer>>& resident,
                  metal_sim::Launch* launch) {
  const auto is_resident = [&](const std::byte* begin, const std::byte* end) {
    const auto has = [&](const Buffer& buffer) {
      const auto* const data = static_cast<const std::byte*>(buffer.data);
      return begin >= data && end <= data + buffer.length;
    };
    return std::any_of(resident.begin(), resident.end(),
                       [&](const auto& each) { return has(*each.first); }) ||
           std::any_of(dispatch.used.begin(), dispatch.used.end(),
                       [&](const auto& each) { return has(*each.get()); });
  };
  bool all = true;
  const auto add = [&](const void* data, int64_t bytes, bool written) {
    if (data == nullptr || bytes == 0) return;
    const auto* const begin = static_cast<const std::byte*>(data);
    all = all && is_resident(begin, begin + bytes);
    launch->addressed_ranges.push_back({begin, begin + bytes, written});
  };
  for (const metal::AddressedRange& range : dispatch.declared->addressed) {
    add(range.data, range.bytes, range.written);
  }
  if (dispatch.declared->reached == nullptr) return all;
  for (const metal::MemoryRange& range : dispatch.declared->reached->ranges) {
    add(range.data, range.bytes, false);
  }
  return all;
}

/// Returns empty, or an error message.
std::string RunDispatch(const Dispatch& dispatch,
                        const std::map<Buffer*, Reference<Buffer>>& resident) {
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
    bound.bytes = binding.bytes;
    bound.read_only = !binding.written;
    bound.initialised = binding.initialised;
    launch.buffers[index] = bound;
  }
  if (!AddAddressed(dispatch, resident, &launch)) {
    return function.name + " reaches memory that is not resident";
  }
  const auto report = metal_sim::Simulate(**kernel, launch, {});
  if (!report.ok()) return report.status().message();
  ++TheLog().dispatches;
  Disturb(dispatch);
  return report->clean() ? "" : report->findings.front().text;
}

}  // namespace

/// The first two of the dispatches [first, last) that need a barrier between them; empty: none.
std::string CommandBuffer::MissingBarrier(size_t first, size_t last) const {
  for (size_t later = first; later < last; ++later) {
    for (size_t earlier = first; earlier < later; ++earlier) {
      for (const Range& range : dispatches[later].ranges) {
        for (const Range& other : dispatches[earlier].ranges) {
          if (!range.Conflicts(other)) continue;
          return fmt::format("no barrier between {} and {}",
                             dispatches[earlier].pipeline->function->name,
                             dispatches[later].pipeline->function->name);
        }
      }
    }
  }
  return {};
}

/// Runs the dispatches between two barriers in reverse order.
std::string CommandBuffer::RunAll() {
  for (size_t first = 0; first < dispatches.size();) {
    size_t last = first;
    while (last < dispatches.size() && dispatches[last].barriers == dispatches[first].barriers) {
      ++last;
    }
    std::string wrong = MissingBarrier(first, last);
    for (size_t i = last; i > first && wrong.empty(); --i) {
      wrong = RunDispatch(dispatches[i - 1], resident);
    }
    if (!wrong.empty()) return wrong;
    first = last;
  }
  return {};
}

void CommandBuffer::TakeResident() {
  if (queue->resident.get() != nullptr) sets.push_back(queue->resident);
  for (const Reference<ResidencySet>& set : sets) {
    resident.insert(set->committed.begin(), set->committed.end());
  }
}

void CommandBuffer::Run() {
  if (TheBehaviour().on_run) TheBehaviour().on_run();
  std::string wrong;
  const int64_t from = TheBehaviour().fails_from;
  const int64_t failing = TheBehaviour().fails;
  if (from >= 0 && number >= from && (failing < 0 || number < from + failing)) {
    wrong = fmt::format("Caused GPU Timeout Error {}", number - from);
  }
  if (wrong.empty()) wrong = RunAll();
  dispatches.clear();  // Releases the objects that they keep alive.
  resident.clear();
  if (!wrong.empty()) {
    auto* made = new Error(TheBehaviour().error, wrong);
    if (tells_encoders) made->blamed = label;
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

}  // namespace marlin::fake_gpu
