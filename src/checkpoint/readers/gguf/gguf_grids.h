// The grids of GGUF's types IQ1, IQ2 and IQ3. A point is 8 values of 2-bit indexes (IQ1, IQ2) or 4
// values of 3-bit indexes (IQ3), lowest bits first; gguf_iq_blocks.cc has the levels they select.
#pragma once

#include <cstdint>

namespace marlin {

extern const uint16_t kIq2XxsGrid[256];
extern const uint16_t kIq2XsGrid[512];
extern const uint16_t kIq2SGrid[1024];
extern const uint16_t kIq3XxsGrid[256];
extern const uint16_t kIq3SGrid[512];
extern const uint16_t kIq1Grid[2048];

}  // namespace marlin
