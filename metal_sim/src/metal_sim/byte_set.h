// A set of the bytes of a piece of memory: one bit each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace metal_sim {

class ByteSet {
 public:
  static constexpr size_t kWord = 64;

  explicit ByteSet(size_t bytes) : words_((bytes + kWord - 1) / kWord) {}

  void Add(size_t offset, size_t bytes) {
    if (offset % kWord + bytes <= kWord) {
      words_[offset / kWord] |= (~uint64_t{0} >> (kWord - bytes)) << offset % kWord;
    } else {
      AddWords(offset, bytes);
    }
  }
  int64_t Count() const;
  /// The kWord bytes from an offset on, the first as the lowest bit.
  uint64_t From(size_t offset) const;

 private:
  void AddWords(size_t offset, size_t bytes);

  std::vector<uint64_t> words_;
};

}  // namespace metal_sim
