// Codes in planes of bits, as GPTQModel stores 5, 6 and 7 bits ("gptq_p").
#pragma once

#include <cstddef>
#include <cstdint>

namespace marlin {

inline constexpr int64_t kPlaneRun = 32;  ///< Codes whose planes lie together.

/// The code at `index` of a run of 32 codes of `bits` bits, which fill `bits` words that lie
/// `stride` words apart. The planes are of 8, 4, 2 and 1 bits, those that add up to `bits`, the
/// widest first; it holds the lowest bits of every code. Precondition: bits is 2 to 8.
int PlanarCode(const std::byte* run, int64_t stride, int bits, int64_t index);

/// Writes a run of 32 codes, one byte each, in this form.
void PutPlanes(const uint8_t* codes, int bits, uint32_t* run, int64_t stride);

}  // namespace marlin
