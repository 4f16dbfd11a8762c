#include "checkpoint/codes/bit_planes.h"

#include "checkpoint/codes/unpack.h"

namespace marlin {

int PlanarCode(const std::byte* run, int64_t stride, int bits, int64_t index) {
  uint32_t code = 0;
  int offset = 0;
  int64_t first = 0;  // The first word of the plane.
  for (int width = 8; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    const int64_t per_word = 32 / width;
    const uint32_t word = WordAt(run, (first + index / per_word) * stride);
    const uint32_t part = (word >> (index % per_word * width)) & ((1u << width) - 1);
    code |= part << offset;
    offset += width;
    first += width;
  }
  return static_cast<int>(code);
}

void PutPlanes(const uint8_t* codes, int bits, uint32_t* run, int64_t stride) {
  int offset = 0;
  for (int width = 8; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    const int64_t per_word = 32 / width;
    for (int64_t w = 0; w < width; ++w, run += stride) {
      uint32_t word = 0;
      for (int64_t i = 0; i < per_word; ++i) {
        const uint32_t part = (unsigned{codes[w * per_word + i]} >> offset) & ((1u << width) - 1);
        word |= part << (i * width);
      }
      *run = word;
    }
    offset += width;
  }
}

}  // namespace marlin
