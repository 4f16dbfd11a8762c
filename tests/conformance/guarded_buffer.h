// Memory for one tensor between two guard zones: kernels must not write the guard bytes, nor let
// them affect a result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "marlin/tensor.h"
#include "random.h"

#if defined(__SANITIZE_ADDRESS__)
#define MARLIN_CONFORMANCE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MARLIN_CONFORMANCE_ASAN 1
#endif
#endif

namespace marlin::conformance {

/// Every byte is initially 0xff, inside and in the guards: NaN in f32, bf16, f16, E4M3 and E8M0.
/// There is no guard behind the data under ASan, so that it reports an access one byte past the
/// end, nor where `trailing_bytes` is 0, which is for a GPU memory checker.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  /// `offset` bytes past a 64-byte boundary.
  explicit GuardedBuffer(int64_t bytes, int64_t offset = 0)
      : bytes_(bytes),
        begin_(kGuardBytes + offset),
        total_(begin_ + bytes + trailing_bytes),
        data_(static_cast<std::byte*>(
            ::operator new (static_cast<size_t>(total_), std::align_val_t{64}))) {
    std::memset(data_.get(), kPoison, static_cast<size_t>(total_));
  }

  /// Returns a copy with the same bytes at the same alignment.
  GuardedBuffer Copy() const {
    GuardedBuffer copy(bytes_, begin_ - kGuardBytes);
    std::memcpy(copy.data_.get(), data_.get(), static_cast<size_t>(total_));
    return copy;
  }

  std::byte* data() const { return data_ ? data_.get() + begin_ : nullptr; }
  int64_t bytes() const { return bytes_; }

  /// Whether both guards still hold the poison.
  bool Intact() const { return IsPoison(0, begin_) && IsPoison(begin_ + bytes_, total_); }
  /// Whether bytes [from, to) of the data still hold the poison.
  bool Untouched(int64_t from, int64_t to) const { return IsPoison(begin_ + from, begin_ + to); }
  void Poison() { std::memset(data(), kPoison, static_cast<size_t>(bytes_)); }
  uint64_t Hash() const {
    return HashText({reinterpret_cast<const char*>(data()), static_cast<size_t>(bytes_)});
  }

  /// Guards and data, starting at a 64-byte boundary; the data start at data_offset().
  std::byte* image() const { return data_.get(); }
  int64_t image_bytes() const { return total_; }
  int64_t data_offset() const { return begin_; }

  static constexpr int kPoison = 0xff;
#if defined(MARLIN_CONFORMANCE_ASAN)
  static constexpr bool kAsan = true;
#else
  static constexpr bool kAsan = false;
#endif
  inline static int64_t trailing_bytes = kAsan ? 0 : 256;

 private:
  static constexpr int64_t kGuardBytes = 256;
  struct Free {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{64}); }
  };

  bool IsPoison(int64_t from, int64_t to) const {
    for (int64_t i = from; i < to; ++i) {
      if (data_.get()[i] != std::byte{kPoison}) return false;
    }
    return true;
  }

  int64_t bytes_ = 0;
  int64_t begin_ = 0;
  int64_t total_ = 0;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace marlin::conformance
