#include "metal_sim/byte_set.h"

#include <algorithm>
#include <bit>

namespace metal_sim {

void ByteSet::AddWords(size_t offset, size_t bytes) {
  while (bytes > 0) {
    const size_t length = std::min(bytes, kWord - offset % kWord);
    words_[offset / kWord] |= (~uint64_t{0} >> (kWord - length)) << offset % kWord;
    offset += length;
    bytes -= length;
  }
}

int64_t ByteSet::Count() const {
  int64_t count = 0;
  for (const uint64_t word : words_) count += word == 0 ? 0 : std::popcount(word);
  return count;
}

uint64_t ByteSet::From(size_t offset) const {
  const size_t word = offset / kWord;
  const size_t shift = offset % kWord;
  const auto at = [&](size_t i) { return i < words_.size() ? words_[i] : 0; };
  return shift == 0 ? at(word) : at(word) >> shift | at(word + 1) << (kWord - shift);
}

}  // namespace metal_sim
