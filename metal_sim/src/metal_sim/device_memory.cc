#include "metal_sim/device_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

namespace metal_sim {
namespace {

constexpr size_t kGuardBytes = size_t{32} << 20;
constexpr size_t kSlackBytes = size_t{8} << 20;
/// A limit that keeps the sums below from overflowing; no machine maps more.
constexpr size_t kMostBytes = size_t{1} << 44;

}  // namespace

BufferCounters DeviceBuffer::Counted() const {
  BufferCounters counted = counters;
  counted.unique_bytes_read = read.Count();
  counted.unique_bytes_written = written.Count();
  return counted;
}

Status DeviceMemory::Reserve(size_t largest, size_t count) {
  const size_t slot = std::bit_ceil(largest + 2 * (kGuardBytes + kSlackBytes));
  const int shift = std::countr_zero(slot);
  if (shift == slot_shift_ && count <= slots_.size()) return {};
  memory_ = MappedMemory();
  slots_.clear();
  METAL_SIM_ASSIGN_OR_RETURN(memory_, MappedMemory::Reserve(slot * count));
  slots_.resize(count);
  slot_shift_ = shift;
  return {};
}

Result<std::byte*> DeviceMemory::Fill(size_t number, const BufferContent& content) {
  Slot& slot = slots_[number];
  const size_t start = (number << slot_shift_) + kGuardBytes;
  const size_t wanted = MappedMemory::WholePages(content.bytes) + 2 * kSlackBytes;
  if (slot.opened < wanted) {
    METAL_SIM_RETURN_IF_ERROR(memory_.Open(start, wanted));
    slot.opened = wanted;
  }
  std::byte* data = memory_.data() + start + kSlackBytes;
  if (content.bytes > 0) std::memcpy(data, content.data, content.bytes);
  // Around a buffer there are zeros, whatever was there in an earlier launch.
  if (slot.filled > content.bytes) {
    std::memset(data + content.bytes, 0, slot.filled - content.bytes);
  }
  slot.filled = content.bytes;
  return data;
}

Status DeviceMemory::Place(const std::vector<BufferContent>& contents, bool check) {
  buffers_.clear();
  used_bytes_ = 0;
  size_t largest = 0;
  for (const BufferContent& content : contents) largest = std::max(largest, content.bytes);
  if (largest > kMostBytes) {
    return {Code::kOutOfMemory, "simulator: a buffer of " + std::to_string(largest) +
                                    " bytes, at most " + std::to_string(kMostBytes)};
  }
  METAL_SIM_RETURN_IF_ERROR(Reserve(largest, contents.size()));
  buffers_.reserve(contents.size());
  for (const BufferContent& content : contents) {
    Slot& slot = slots_[buffers_.size()];
    METAL_SIM_ASSIGN_OR_RETURN(std::byte * data, Fill(buffers_.size(), content));
    BufferCounters counters;
    counters.name = content.name;
    DeviceBuffer buffer{.data = data,
                        .origin = content.data,
                        .bytes = content.bytes,
                        .index = content.index,
                        .read_only = content.read_only,
                        .initialised = content.initialised,
                        .shadow = nullptr,
                        .read = ByteSet(content.bytes),
                        .written = ByteSet(content.bytes),
                        .counters = std::move(counters)};
    if (check && (!content.read_only || !content.initialised)) {
      if (slot.shadow.bytes() < content.bytes) {
        METAL_SIM_ASSIGN_OR_RETURN(slot.shadow, ShadowMemory::Allocate(content.bytes));
      }
      buffer.shadow = &slot.shadow;
    }
    buffers_.push_back(std::move(buffer));
  }
  used_bytes_ = contents.size() << slot_shift_;
  return {};
}

size_t DeviceMemory::held_bytes() const {
  size_t bytes = 0;
  for (const Slot& slot : slots_) {
    bytes += slot.opened - std::min(slot.opened, 2 * kSlackBytes);
    bytes += slot.shadow.bytes() * sizeof(ShadowCell);
  }
  return bytes;
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

}  // namespace metal_sim
