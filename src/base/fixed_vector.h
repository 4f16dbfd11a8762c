// A vector with inline storage, for short lists built without allocation.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <initializer_list>
#include <utility>

namespace marlin {

/// Up to kCapacity default-constructible elements. Precondition of insertions: there is room.
template <typename T, size_t kCapacity>
class FixedVector {
 public:
  FixedVector() = default;
  FixedVector(std::initializer_list<T> values) {  // NOLINT(google-explicit-constructor)
    for (const T& value : values) push_back(value);
  }

  void push_back(T value) {
    assert(size_ < kCapacity);
    items_[size_++] = std::move(value);
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return items_[i]; }
  const T& operator[](size_t i) const { return items_[i]; }
  T& back() { return items_[size_ - 1]; }
  const T& back() const { return items_[size_ - 1]; }
  T* begin() { return items_.data(); }
  T* end() { return items_.data() + size_; }
  const T* begin() const { return items_.data(); }
  const T* end() const { return items_.data() + size_; }

 private:
  std::array<T, kCapacity> items_{};
  size_t size_ = 0;
};

}  // namespace marlin
