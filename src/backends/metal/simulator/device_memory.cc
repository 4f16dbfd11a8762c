#include "backends/metal/simulator/device_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/macros.h"

namespace marlin::metal::simulator {
namespace {

constexpr size_t kGuardBytes = size_t{32} << 20;
constexpr size_t kSlackBytes = size_t{8} << 20;
/// A limit that keeps the sums below from overflowing; no machine maps more.
constexpr size_t kMostBytes = size_t{1} << 44;

}  // namespace

int64_t ByteSet::Add(size_t offset, size_t bytes) {
  int64_t added = 0;
  while (bytes > 0) {
    const size_t bit = offset % 64;
    const size_t length = std::min(bytes, 64 - bit);
    const uint64_t mask = (~uint64_t{0} >> (64 - length)) << bit;
    uint64_t& word = words_[offset / 64];
    added += std::popcount(mask & ~word);
    word |= mask;
    offset += length;
    bytes -= length;
  }
  return added;
}

void DeviceBuffer::Count(size_t offset, size_t length, bool reads, bool writes) {
  if (reads) {
    ++counters.reads;
    counters.bytes_read += static_cast<int64_t>(length);
    counters.unique_bytes_read += read.Add(offset, length);
  }
  if (writes) {
    ++counters.writes;
    counters.bytes_written += static_cast<int64_t>(length);
    counters.unique_bytes_written += written.Add(offset, length);
  }
}

Result<DeviceMemory> DeviceMemory::Create(const std::vector<BufferContent>& contents, bool check) {
  DeviceMemory device;
  size_t largest = 0;
  for (const BufferContent& content : contents) largest = std::max(largest, content.bytes);
  if (largest > kMostBytes) {
    return Status(Code::kOutOfMemory, "simulator: a buffer of " + std::to_string(largest) +
                                          " bytes, at most " + std::to_string(kMostBytes));
  }
  const size_t slot = std::bit_ceil(largest + 2 * (kGuardBytes + kSlackBytes));
  device.slot_shift_ = std::countr_zero(slot);
  MARLIN_ASSIGN_OR_RETURN(device.memory_, MappedMemory::Reserve(slot * contents.size()));
  for (const BufferContent& content : contents) {
    const size_t slack = device.buffers_.size() * slot + kGuardBytes;
    const size_t opened = MappedMemory::WholePages(content.bytes) + 2 * kSlackBytes;
    MARLIN_RETURN_IF_ERROR(device.memory_.Open(slack, opened));
    std::byte* data = device.memory_.data() + slack + kSlackBytes;
    if (content.bytes > 0) std::memcpy(data, content.data, content.bytes);
    BufferCounters counters;
    counters.name = content.name;
    DeviceBuffer buffer{.index = content.index,
                        .data = data,
                        .bytes = content.bytes,
                        .read_only = content.read_only,
                        .initialised = content.initialised,
                        .cells = nullptr,
                        .counters = std::move(counters),
                        .read = ByteSet(content.bytes),
                        .written = ByteSet(content.bytes)};
    if (check && (!content.read_only || !content.initialised)) {
      MARLIN_ASSIGN_OR_RETURN(MappedMemory shadow,
                              MappedMemory::Allocate(content.bytes * sizeof(ShadowCell)));
      buffer.cells = reinterpret_cast<ShadowCell*>(shadow.data());
      device.shadows_.push_back(std::move(shadow));
    }
    device.buffers_.push_back(std::move(buffer));
  }
  return device;
}

bool DeviceMemory::IsOpen(const DeviceBuffer& buffer, uintptr_t address, size_t bytes) {
  const uintptr_t offset = address - (buffer.begin() - kSlackBytes);
  const size_t opened = buffer.bytes + 2 * kSlackBytes;
  return offset <= opened && bytes <= opened - offset;
}

const DeviceBuffer* DeviceMemory::Find(int index) const {
  for (const DeviceBuffer& buffer : buffers_) {
    if (buffer.index == index) return &buffer;
  }
  return nullptr;
}

}  // namespace marlin::metal::simulator
