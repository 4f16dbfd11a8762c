#include "base/aligned_buffer.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <string>

#include "base/checked.h"
#include "base/errors.h"

namespace marlin {
namespace {
constexpr int64_t kHugePageBytes = int64_t{2} << 20;
}  // namespace

void AlignedBuffer::Free::operator()(std::byte* data) const { std::free(data); }

Result<AlignedBuffer> AlignedBuffer::Allocate(int64_t bytes) {
  if (bytes < 0) return Invalid("buffer: negative size");
  const bool huge = bytes >= kHugePageBytes;
  const int64_t alignment = huge ? kHugePageBytes : kBufferAlignment;
  const Checked blocks = CeilDiv(Checked(bytes == 0 ? 1 : bytes), Checked(alignment));
  // A size that cannot be rounded up cannot be allocated either.
  const int64_t rounded = (blocks * Checked(alignment)).Take().value_or(0);
  AlignedBuffer buffer;
  if (rounded > 0) {
    buffer.data_.reset(static_cast<std::byte*>(
        std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded))));
  }
  if (!buffer.data_) {
    return Status(Code::kOutOfMemory, "cannot allocate " + std::to_string(bytes) + " bytes");
  }
  buffer.size_ = bytes;
#if defined(__linux__)
  // Only a hint: without huge pages everything still works, slower.
  if (huge) (void)madvise(buffer.data_.get(), static_cast<size_t>(rounded), MADV_HUGEPAGE);
#endif
  return buffer;
}

}  // namespace marlin
