#include "device_image.h"

#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "device_runtime.h"
#include "random.h"

namespace marlin::conformance {
namespace {

uint64_t HashImage(const GuardedBuffer& buffer) {
  return HashText(
      {reinterpret_cast<const char*>(buffer.image()), static_cast<size_t>(buffer.image_bytes())});
}

}  // namespace

Result<DeviceImage> DeviceImage::Make(const Device& device, GuardedBuffer host) {
  DeviceImage image;
  image.backend_ = device.info().backend;
  image.host_ = std::move(host);
  if (GuardedBuffer::kAsan && image.backend_ == "cpu") {
    image.hash_ = HashImage(image.host_);
    return image;
  }
  const int64_t bytes = image.host_.image_bytes();
  MARLIN_ASSIGN_OR_RETURN(image.memory_, DeviceBuffer::Allocate(device, bytes));
  MARLIN_RETURN_IF_ERROR(image.memory_.CopyFrom(image.host_.image(), bytes));
  return image;
}

void* DeviceImage::data() const {
  if (in_place()) return host_.data();
  return static_cast<std::byte*>(memory_.data()) + host_.data_offset();
}

Status DeviceImage::Poison() {
  host_.Poison();
  if (in_place()) return Status();
  MARLIN_ASSIGN_OR_RETURN(const bool filled,
                          FillMemory(backend_, data(), GuardedBuffer::kPoison, host_.bytes()));
  if (filled) return Status();
  return memory_.CopyFrom(host_.data(), host_.bytes(), host_.data_offset());
}

Status DeviceImage::Download() {
  if (in_place()) return Status();
  return memory_.CopyTo(host_.image(), host_.image_bytes());
}

Status DeviceImage::DownloadGuards() {
  if (in_place()) return Status();
  const int64_t behind = host_.data_offset() + host_.bytes();
  MARLIN_RETURN_IF_ERROR(memory_.CopyTo(host_.image(), host_.data_offset()));
  return memory_.CopyTo(host_.image() + behind, host_.image_bytes() - behind, behind);
}

Result<bool> DeviceImage::Changed() const {
  if (host_.image() == nullptr) return false;
  if (in_place()) return HashImage(host_) != hash_;
  const auto bytes = static_cast<size_t>(host_.image_bytes());
  const auto now = std::make_unique_for_overwrite<std::byte[]>(bytes);
  MARLIN_RETURN_IF_ERROR(memory_.CopyTo(now.get(), host_.image_bytes()));
  return std::memcmp(now.get(), host_.image(), bytes) != 0;
}

}  // namespace marlin::conformance
