#include "metal_sim/launch_checks.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <string_view>

namespace metal_sim {
namespace {

constexpr uint64_t kMostThreadsPerThreadgroup = 1024;
/// Far more than can be simulated; keeps linear indices in 32 bits.
constexpr uint64_t kMostThreadgroups = uint64_t{1} << 28;
/// Metal's limit for setBytes.
constexpr size_t kMostValueBytes = 4096;
constexpr int64_t kThreadgroupMemoryUnit = 16;

Status Invalid(std::string_view message) { return {Code::kInvalidArgument, message}; }

std::string SizeText(const Size3& size) { return fmt::format("{}x{}x{}", size.x, size.y, size.z); }

/// The product of three factors of 32 bits, or a value above every limit.
uint64_t Volume(const Size3& size) {
  const uint64_t plane = uint64_t{size.x} * size.y;
  if (plane > std::numeric_limits<uint32_t>::max()) return plane;
  return plane * size.z;
}

const char* ArgumentName(const Kernel& kernel, Source source, int index) {
  for (int i = 0; i < kernel.argument_count; ++i) {
    const Argument& argument = kernel.arguments[i];
    const bool bound = argument.source == source && argument.index == index;
    if (bound && argument.IsPresent()) return argument.name;
  }
  return nullptr;
}

std::string BufferName(const Kernel& kernel, int index, const std::string& given) {
  if (!given.empty()) return given;
  const char* name = ArgumentName(kernel, Source::kBuffer, index);
  return name != nullptr ? name : fmt::format("buffer({})", index);
}

bool Overlap(const BufferContent& a, const BufferContent& b) {
  const auto first = reinterpret_cast<uintptr_t>(a.data);
  const auto second = reinterpret_cast<uintptr_t>(b.data);
  return first < second + b.bytes && second < first + a.bytes;
}

/// Buffers are copied, so that what is written through an address would drift apart from them.
Status CheckAddressedRanges(const std::vector<BufferContent>& contents, const Launch& launch) {
  for (const AddressedRange& range : launch.addressed_ranges) {
    const auto begin = reinterpret_cast<uintptr_t>(range.begin);
    const auto end = reinterpret_cast<uintptr_t>(range.end);
    if (end < begin) return Invalid("addressed range: it ends before it begins");
    for (const BufferContent& content : contents) {
      const auto first = reinterpret_cast<uintptr_t>(content.data);
      const bool written = range.written || !content.read_only;
      if (written && first < end && begin < first + content.bytes) {
        return {Code::kUnsupported,
                fmt::format("{} (buffer {}) overlaps memory that is reached through an address, "
                            "and one is not read-only",
                            content.name, content.index)};
      }
    }
  }
  return {};
}

/// The simulator copies each binding, so that two bindings of one memory would drift apart.
Status CheckOverlaps(const std::vector<BufferContent>& contents) {
  for (size_t i = 0; i < contents.size(); ++i) {
    for (size_t j = i + 1; j < contents.size(); ++j) {
      const BufferContent& a = contents[i];
      const BufferContent& b = contents[j];
      if ((!a.read_only || !b.read_only) && Overlap(a, b)) {
        return {Code::kUnsupported,
                fmt::format("{} (buffer {}) and {} (buffer {}) overlap, and one is not read-only",
                            a.name, a.index, b.name, b.index)};
      }
    }
  }
  return {};
}

}  // namespace

Result<Grid> PlanGrid(const Kernel& kernel, const Launch& launch) {
  const Size3& per_group = launch.threads_per_threadgroup;
  const uint64_t group_threads = Volume(per_group);
  const uint64_t most = kernel.max_threads == 0 ? kMostThreadsPerThreadgroup : kernel.max_threads;
  if (group_threads == 0 || group_threads > most) {
    return Invalid(fmt::format(
        "threads per threadgroup: {}, expected 1 to {} threads{}", SizeText(per_group), most,
        kernel.max_threads == 0
            ? ""
            : fmt::format(" ({} has max_total_threads_per_threadgroup)", kernel.name)));
  }
  if (Volume(launch.grid) == 0) {
    return Invalid(fmt::format("grid: {} is empty", SizeText(launch.grid)));
  }
  Size3 groups = launch.grid;
  if (launch.grid_counts_threads) {
    const auto divide = [](uint32_t a, uint32_t b) { return a / b + (a % b == 0 ? 0 : 1); };
    groups = {divide(groups.x, per_group.x), divide(groups.y, per_group.y),
              divide(groups.z, per_group.z)};
  }
  const uint64_t group_count = Volume(groups);
  if (group_count > kMostThreadgroups) {
    return Invalid(
        fmt::format("grid: {} threadgroups, at most {}", SizeText(groups), kMostThreadgroups));
  }
  const auto threads = [&](uint32_t grid, uint32_t per) {
    return launch.grid_counts_threads ? uint64_t{grid} : uint64_t{grid} * per;
  };
  const uint64_t x = threads(launch.grid.x, per_group.x);
  const uint64_t y = threads(launch.grid.y, per_group.y);
  const uint64_t z = threads(launch.grid.z, per_group.z);
  if (std::max({x, y, z}) > std::numeric_limits<uint32_t>::max()) {
    return Invalid(fmt::format("grid: {} threadgroups of {} threads: positions exceed 32 bits",
                               SizeText(groups), SizeText(per_group)));
  }
  Grid grid;
  grid.threads = {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
  grid.threadgroups = {groups.x, groups.y, groups.z};
  grid.threads_per_threadgroup = {per_group.x, per_group.y, per_group.z};
  grid.threadgroup_count = static_cast<uint32_t>(group_count);
  grid.threads_per_threadgroup_count = static_cast<uint32_t>(group_threads);
  return grid;
}

Result<std::vector<BufferContent>> CollectBuffers(const Kernel& kernel, const Launch& launch) {
  std::vector<BufferContent> contents;
  for (const auto& [index, binding] : launch.buffers) {
    const std::string name = BufferName(kernel, index, binding.name);
    if (binding.bytes < 0 || (binding.bytes > 0 && binding.data == nullptr)) {
      return Invalid(fmt::format("{} (buffer {}): {} bytes at {}", name, index, binding.bytes,
                                 binding.data == nullptr ? "no address" : "an address"));
    }
    contents.push_back({index, name, binding.data, static_cast<size_t>(binding.bytes),
                        binding.read_only, binding.initialised});
  }
  METAL_SIM_RETURN_IF_ERROR(CheckOverlaps(contents));
  METAL_SIM_RETURN_IF_ERROR(CheckAddressedRanges(contents, launch));
  for (const auto& [index, bytes] : launch.values) {
    const std::string name = BufferName(kernel, index, "");
    if (launch.buffers.count(index) != 0) {
      return Invalid(
          fmt::format("{} (buffer {}): bound both to a buffer and to a value", name, index));
    }
    if (bytes.empty() || bytes.size() > kMostValueBytes) {
      return Invalid(fmt::format("{} (buffer {}): a value of {} bytes, expected 1 to {}", name,
                                 index, bytes.size(), kMostValueBytes));
    }
    contents.push_back({index, name, bytes.data(), bytes.size(), true, true});
  }
  for (int i = 0; i < kernel.argument_count; ++i) {
    const Argument& argument = kernel.arguments[i];
    if (argument.source != Source::kBuffer || !argument.IsPresent()) continue;
    if (launch.buffers.count(argument.index) == 0 && launch.values.count(argument.index) == 0) {
      return Invalid(fmt::format("{}: argument {} (buffer {}) is not bound", kernel.name,
                                 argument.name, argument.index));
    }
  }
  std::sort(contents.begin(), contents.end(),
            [](const BufferContent& a, const BufferContent& b) { return a.index < b.index; });
  return contents;
}

Status CheckThreadgroupMemory(const Kernel& kernel, const Launch& launch) {
  for (const auto& [index, bytes] : launch.threadgroup_memory) {
    if (bytes <= 0 || bytes % kThreadgroupMemoryUnit != 0) {
      return Invalid(fmt::format("threadgroup memory {}: {} bytes, expected a multiple of {}",
                                 index, bytes, kThreadgroupMemoryUnit));
    }
  }
  for (int i = 0; i < kernel.argument_count; ++i) {
    const Argument& argument = kernel.arguments[i];
    if (argument.source != Source::kThreadgroupMemory || !argument.IsPresent()) continue;
    if (launch.threadgroup_memory.count(argument.index) == 0) {
      return Invalid(fmt::format("{}: the length of {} (threadgroup memory {}) is not set",
                                 kernel.name, argument.name, argument.index));
    }
  }
  return {};
}

Status CheckOptions(const SimulationOptions& options) {
  if (options.resident_threadgroups < 1 || options.resident_threadgroups > 64) {
    return Invalid(
        fmt::format("resident_threadgroups: {}, expected 1 to 64", options.resident_threadgroups));
  }
  if (!(options.preemption >= 0 && options.preemption <= 1)) {
    return Invalid(fmt::format("preemption: {}, expected 0 to 1", options.preemption));
  }
  if (options.step_limit < 1) {
    return Invalid(fmt::format("step_limit: {}, expected at least 1", options.step_limit));
  }
  return {};
}

}  // namespace metal_sim
